#include "similarity_kernels.h"

#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FMOE_HAS_X86_KERNELS 1
#include <immintrin.h>
#endif

namespace fmoe {
namespace {

void accumulate_plain(const Half* columns, std::size_t stride, const int* which,
                      const float* weights, int num_columns, int count, float* running) {
    for (int i = 0; i < num_columns; ++i) {
        const Half* column = columns + static_cast<std::size_t>(which[i]) * stride;
        for (int c = 0; c < count; ++c) running[c] += weights[i] * to_float(column[c]);
    }
}

float dot_plain(const Half* a, const float* b, int size) {
    float sum = 0;
    for (int i = 0; i < size; ++i) sum += to_float(a[i]) * b[i];
    return sum;
}

BestScore best_plain(const float* dots, const float* scales, int count) {
    BestScore best{-1, -std::numeric_limits<float>::infinity()};
    for (int c = 0; c < count; ++c) {
        const float score = dots[c] * scales[c];
        if (score > best.score) best = {c, score};
    }
    return best.index < 0 ? BestScore{} : best;
}

#ifdef FMOE_HAS_X86_KERNELS

#define FMOE_AVX2 __attribute__((target("avx2,fma,f16c")))

FMOE_AVX2 void accumulate_avx2(const Half* columns, std::size_t stride, const int* which,
                               const float* weights, int num_columns, int count, float* running) {
    constexpr int kLanes = 8;
    constexpr int kRegisters = kColumnBlock / kLanes;
    for (int c = 0; c < count; c += kColumnBlock) {
        __m256 sums[kRegisters];
        for (int r = 0; r < kRegisters; ++r) sums[r] = _mm256_loadu_ps(running + c + r * kLanes);
        for (int i = 0; i < num_columns; ++i) {
            const Half* column = columns + static_cast<std::size_t>(which[i]) * stride + c;
            const __m256 weight = _mm256_set1_ps(weights[i]);
            for (int r = 0; r < kRegisters; ++r) {
                const auto* halves = reinterpret_cast<const __m128i*>(column + r * kLanes);
                sums[r] =
                    _mm256_fmadd_ps(weight, _mm256_cvtph_ps(_mm_loadu_si128(halves)), sums[r]);
            }
        }
        for (int r = 0; r < kRegisters; ++r) _mm256_storeu_ps(running + c + r * kLanes, sums[r]);
    }
}

FMOE_AVX2 float dot_avx2(const Half* a, const float* b, int size) {
    __m256 even = _mm256_setzero_ps();
    __m256 odd = _mm256_setzero_ps();
    for (int i = 0; i < size; i += 16) {
        const auto* halves = reinterpret_cast<const __m128i*>(a + i);
        even =
            _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_loadu_ps(b + i), even);
        odd = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128(halves + 1)),
                              _mm256_loadu_ps(b + i + 8), odd);
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, _mm256_add_ps(even, odd));
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

FMOE_AVX2 BestScore best_avx2(const float* dots, const float* scales, int count) {
    constexpr int kLanes = 8;
    __m256 best = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
    __m256i best_index = _mm256_set1_epi32(-1);
    __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i step = _mm256_set1_epi32(kLanes);
    int c = 0;
    for (; c + kLanes <= count; c += kLanes) {
        const __m256 score = _mm256_mul_ps(_mm256_loadu_ps(dots + c), _mm256_loadu_ps(scales + c));
        const __m256 wins = _mm256_cmp_ps(score, best, _CMP_GT_OQ);
        best = _mm256_blendv_ps(best, score, wins);
        best_index = _mm256_castps_si256(
            _mm256_blendv_ps(_mm256_castsi256_ps(best_index), _mm256_castsi256_ps(index), wins));
        index = _mm256_add_epi32(index, step);
    }
    alignas(32) float scores[kLanes];
    alignas(32) int indices[kLanes];
    _mm256_store_ps(scores, best);
    _mm256_store_si256(reinterpret_cast<__m256i*>(indices), best_index);
    BestScore winner{-1, -std::numeric_limits<float>::infinity()};
    for (int lane = 0; lane < kLanes; ++lane) {
        if (indices[lane] < 0) continue;
        if (scores[lane] > winner.score ||
            (scores[lane] == winner.score && indices[lane] < winner.index))
            winner = {indices[lane], scores[lane]};
    }
    for (; c < count; ++c) {
        const float score = dots[c] * scales[c];
        if (score > winner.score) winner = {c, score};
    }
    return winner.index < 0 ? BestScore{} : winner;
}

#endif

constexpr SimilarityKernels kPlain{accumulate_plain, dot_plain, best_plain, "plain"};

const SimilarityKernels& choose() {
#ifdef FMOE_HAS_X86_KERNELS
    static constexpr SimilarityKernels kAvx2{accumulate_avx2, dot_avx2, best_avx2, "avx2"};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return kAvx2;
#endif
    return kPlain;
}

}  // namespace

const SimilarityKernels& similarity_kernels() {
    static const SimilarityKernels& chosen = choose();
    return chosen;
}

const SimilarityKernels& plain_similarity_kernels() { return kPlain; }

}  // namespace fmoe
