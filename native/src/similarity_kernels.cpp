#include "similarity_kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FMOE_HAS_X86_KERNELS 1
#include <immintrin.h>
#endif

#define FMOE_INLINE inline __attribute__((always_inline))

namespace fmoe {
namespace {

// A tile of the product: its sums stay in registers. By the compiler's vectors, so that one body
// serves each instruction set.
template <int kLanes, int kRows>
FMOE_INLINE void multiply_tile(const float* queries, std::size_t stride, const float* panel,
                               int num_terms, float* sums) {
    using Floats [[gnu::vector_size(kLanes * sizeof(float))]] = float;
    constexpr int kVectors = 2;
    Floats tile[kRows][kVectors] = {};
    for (int i = 0; i < num_terms; ++i) {
        Floats terms[kVectors];
        for (int v = 0; v < kVectors; ++v)
            std::memcpy(&terms[v], panel + i * kColumnBlock + v * kLanes, sizeof(Floats));
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) tile[r][v] += queries[r] * terms[v];
        queries += stride;
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            float* sum = sums + r * kColumnBlock + v * kLanes;
            Floats total;
            std::memcpy(&total, sum, sizeof total);
            total += tile[r][v];
            std::memcpy(sum, &total, sizeof total);
        }
    }
}

template <int kLanes, int kRows>
FMOE_INLINE void multiply_body(const float* queries, std::size_t stride, int num_queries,
                               const float* panel, int num_terms, float* sums) {
    int r = 0;
    for (; r + kRows <= num_queries; r += kRows)
        for (int c = 0; c < kColumnBlock; c += 2 * kLanes)
            multiply_tile<kLanes, kRows>(queries + r, stride, panel + c, num_terms,
                                         sums + r * kColumnBlock + c);
    if constexpr (kRows > 1)
        multiply_body<kLanes, kRows / 2>(queries + r, stride, num_queries - r, panel, num_terms,
                                         sums + r * kColumnBlock);
}

void accumulate_plain(const Half* columns, std::size_t stride, const int* which,
                      const float* weights, int num_columns, int count, float* running) {
    for (int begin = 0; begin < num_columns; begin += kLongestSum) {
        const int end = std::min(begin + kLongestSum, num_columns);
        for (int block = 0; block < count; block += kColumnBlock) {
            float sums[kColumnBlock] = {};
            for (int i = begin; i < end; ++i) {
                const Half* column = columns + static_cast<std::size_t>(which[i]) * stride + block;
                for (int c = 0; c < kColumnBlock; ++c) sums[c] += weights[i] * to_float(column[c]);
            }
            for (int c = 0; c < kColumnBlock; ++c) running[block + c] += sums[c];
        }
    }
}

void unpack_plain(const Half* columns, const Half*, std::size_t stride, int num_terms,
                  float* panel) {
    for (int i = 0; i < num_terms; ++i)
        for (int c = 0; c < kColumnBlock; ++c)
            panel[i * kColumnBlock + c] =
                to_float(columns[static_cast<std::size_t>(i) * stride + c]);
}

void multiply_plain(const float* queries, std::size_t stride, int num_queries, const float* panel,
                    int num_terms, float* sums) {
    multiply_body<4, 4>(queries, stride, num_queries, panel, num_terms, sums);
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

FMOE_AVX2 inline __m256 to_floats(const Half* halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

FMOE_AVX2 void accumulate_avx2(const Half* columns, std::size_t stride, const int* which,
                               const float* weights, int num_columns, int count, float* running) {
    constexpr int kLanes = 8;
    constexpr int kRegisters = kColumnBlock / kLanes;
    constexpr int kBlocksAhead = 8;
    for (int c = 0; c < count; c += kColumnBlock) {
        for (int begin = 0; begin < num_columns; begin += kLongestSum) {
            const int end = std::min(begin + kLongestSum, num_columns);
            __m256 sums[kRegisters] = {};
            for (int i = begin; i < end; ++i) {
                const Half* column = columns + static_cast<std::size_t>(which[i]) * stride + c;
                // A few blocks ahead, for all columns at once: one after the other they would wait
                // for memory. Past a column's end it is the next column, which does no harm.
                const char* ahead =
                    reinterpret_cast<const char*>(column + kBlocksAhead * kColumnBlock);
                _mm_prefetch(ahead, _MM_HINT_T0);
                _mm_prefetch(ahead + 64, _MM_HINT_T0);
                const __m256 weight = _mm256_set1_ps(weights[i]);
                for (int r = 0; r < kRegisters; ++r)
                    sums[r] = _mm256_fmadd_ps(weight, to_floats(column + r * kLanes), sums[r]);
            }
            for (int r = 0; r < kRegisters; ++r) {
                float* total = running + c + r * kLanes;
                _mm256_storeu_ps(total, _mm256_add_ps(_mm256_loadu_ps(total), sums[r]));
            }
        }
    }
}

FMOE_AVX2 void unpack_avx2(const Half* columns, const Half* next, std::size_t stride, int num_terms,
                           float* panel) {
    for (int i = 0; i < num_terms; ++i) {
        for (int c = 0; c < kColumnBlock; c += 8)
            _mm256_storeu_ps(panel + c, to_floats(columns + c));
        _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(next) + 64, _MM_HINT_T1);
        next += stride;
        columns += stride;
        panel += kColumnBlock;
    }
}

FMOE_AVX2 void multiply_avx2(const float* queries, std::size_t stride, int num_queries,
                             const float* panel, int num_terms, float* sums) {
    multiply_body<8, 4>(queries, stride, num_queries, panel, num_terms, sums);
}

__attribute__((target("avx512f"))) void multiply_avx512(const float* queries, std::size_t stride,
                                                        int num_queries, const float* panel,
                                                        int num_terms, float* sums) {
    multiply_body<16, 8>(queries, stride, num_queries, panel, num_terms, sums);
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

constexpr SimilarityKernels kPlain{accumulate_plain, best_plain, unpack_plain, multiply_plain,
                                   "plain"};
#ifdef FMOE_HAS_X86_KERNELS
constexpr SimilarityKernels kAvx2{accumulate_avx2, best_avx2, unpack_avx2, multiply_avx2, "avx2"};
constexpr SimilarityKernels kAvx512{accumulate_avx2, best_avx2, unpack_avx2, multiply_avx512,
                                    "avx512"};
#endif

}  // namespace

std::vector<const SimilarityKernels*> runnable_similarity_kernels() {
    std::vector<const SimilarityKernels*> runnable{&kPlain};
#ifdef FMOE_HAS_X86_KERNELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        runnable.push_back(&kAvx2);
        if (__builtin_cpu_supports("avx512f")) runnable.push_back(&kAvx512);
    }
#endif
    return runnable;
}

const SimilarityKernels& similarity_kernels() {
    static const SimilarityKernels& chosen = *runnable_similarity_kernels().back();
    return chosen;
}

}  // namespace fmoe
