#include "model_kernels.h"

#include <cstdint>
#include <cstring>

// One body, compiled for each instruction set: vectors of the compiler become whatever registers
// the target has. No square root and no library call, which would need flags that loosen the
// arithmetic.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FMOE_HAS_X86_KERNELS 1
#endif

#define FMOE_INLINE inline __attribute__((always_inline))

namespace fmoe {
namespace {

constexpr int kRegisters = 4;
constexpr int kBlock = kRegisters * kLanes;

using Floats [[gnu::vector_size(kLanes * sizeof(float))]] = float;
using Ints [[gnu::vector_size(kLanes * sizeof(std::int32_t))]] = std::int32_t;

// By reference throughout: how such a vector is passed by value depends on the target.
FMOE_INLINE void load(const float* from, Floats& to) { std::memcpy(&to, from, sizeof to); }
FMOE_INLINE void store(const Floats& from, float* to) { std::memcpy(to, &from, sizeof from); }
FMOE_INLINE void bits_of(const Floats& from, Ints& to) { std::memcpy(&to, &from, sizeof to); }
FMOE_INLINE void from_bits(const Ints& from, Floats& to) { std::memcpy(&to, &from, sizeof to); }

template <int num_registers>
FMOE_INLINE void add_columns(float* sum, const float* columns, const int* rows, const float* values,
                             int num_rows, int n) {
    Floats sums[num_registers];
    for (int k = 0; k < num_registers; ++k) load(sum + k * kLanes, sums[k]);
    for (int r = 0; r < num_rows; ++r) {
        const float* row = columns + static_cast<std::size_t>(rows[r]) * n;
        for (int k = 0; k < num_registers; ++k) {
            Floats weights;
            load(row + k * kLanes, weights);
            sums[k] += values[r] * weights;
        }
    }
    for (int k = 0; k < num_registers; ++k) store(sums[k], sum + k * kLanes);
}

FMOE_INLINE void add_rows_body(float* sum, const float* matrix, const int* rows,
                               const float* values, int num_rows, int n) {
    int i = 0;
    for (; i + kBlock <= n; i += kBlock)
        add_columns<kRegisters>(sum + i, matrix + i, rows, values, num_rows, n);
    for (; i < n; i += kLanes) add_columns<1>(sum + i, matrix + i, rows, values, num_rows, n);
}

FMOE_INLINE void add_product_body(float* sum, const float* a, const float* b, int n) {
    for (int i = 0; i < n; i += kLanes) {
        Floats s, x, y;
        load(sum + i, s);
        load(a + i, x);
        load(b + i, y);
        s += x * y;
        store(s, sum + i);
    }
}

FMOE_INLINE float dot_body(const float* a, const float* b, int n) {
    Floats sums = {};
    for (int i = 0; i < n; i += kLanes) {
        Floats x, y;
        load(a + i, x);
        load(b + i, y);
        sums += x * y;
    }
    float lanes[kLanes];
    store(sums, lanes);
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

// 1 / sqrt(x): the exponent halved in the bits, then two Newton steps (relative error 5e-6).
FMOE_INLINE void inverse_root(const Floats& x, Floats& root) {
    Ints bits;
    bits_of(x, bits);
    from_bits(0x5f3759df - (bits >> 1), root);
    const Floats half = 0.5F * x;
    root *= 1.5F - half * root * root;
    root *= 1.5F - half * root * root;
}

FMOE_INLINE void descend_rows_body(float* matrix, float* squares, const int* rows,
                                   const float* values, int num_rows, int n, const float* error,
                                   const Segment* segments, int num_segments,
                                   const float* mean_squares, const float* rates) {
    const int stride = to_lanes(num_segments);
    for (int r = 0; r < num_rows; ++r) {
        const float value = values[r];
        float steps[kMostSegments];
        float* row_squares = squares + static_cast<std::size_t>(rows[r]) * stride;
        for (int s = 0; s < stride; s += kLanes) {
            Floats sum, mean, rate, root;
            load(row_squares + s, sum);
            load(mean_squares + s, mean);
            load(rates + s, rate);
            sum += value * value * mean;
            store(sum, row_squares + s);
            inverse_root(sum, root);
            store(value * rate * root, steps + s);
        }
        float* row = matrix + static_cast<std::size_t>(rows[r]) * n;
        for (int s = 0; s < num_segments; ++s) {
            const int end = segments[s].begin + segments[s].size;
            for (int i = segments[s].begin; i < end; i += kLanes) {
                Floats weights, e;
                load(row + i, weights);
                load(error + i, e);
                weights -= steps[s] * e;
                store(weights, row + i);
            }
        }
    }
}

FMOE_INLINE void descend_each_body(float* weights, float* squares, const float* error,
                                   const float* input, float rate, int n) {
    for (int i = 0; i < n; i += kLanes) {
        Floats w, sum, e, x, root;
        load(weights + i, w);
        load(squares + i, sum);
        load(error + i, e);
        load(input + i, x);
        const Floats gradient = x * e;
        sum += gradient * gradient;
        inverse_root(sum, root);
        w -= rate * gradient * root;
        store(w, weights + i);
        store(sum, squares + i);
    }
}

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2; n by rounding in the mantissa, exp(r) by its series.
FMOE_INLINE void exponential(const Floats& given, Floats& result) {
    constexpr float kLargest = 80.0F;
    constexpr float kRound = 12582912.0F;  // 1.5 * 2^23
    Floats x = given < kLargest ? given : kLargest + 0 * given;
    x = x > -kLargest ? x : 0 * x - kLargest;
    const Floats rounded = x * 1.44269504F + kRound;
    const Floats n = rounded - kRound;
    const Floats r = x - n * 0.693359375F + n * 2.12194440e-4F;
    Floats series = r * (1.0F / 720) + 1.0F / 120;
    series = series * r + 1.0F / 24;
    series = series * r + 1.0F / 6;
    series = series * r + 0.5F;
    series = series * r + 1.0F;
    series = series * r + 1.0F;
    Floats power;
    from_bits((__builtin_convertvector(n, Ints) + 127) << 23, power);
    result = series * power;
}

FMOE_INLINE void sigmoid_body(float* z, int n) {
    for (int i = 0; i < n; i += kLanes) {
        Floats x, e;
        load(z + i, x);
        exponential(-x, e);
        store(1.0F / (1.0F + e), z + i);
    }
}

// log(x) = e ln(2) + log(m), m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh(t), t = (m - 1) / (m + 1).
FMOE_INLINE void log_body(float* x, int n) {
    constexpr std::int32_t kRootHalf = 0x3f3504f3;
    for (int i = 0; i < n; i += kLanes) {
        Floats value, m;
        Ints bits;
        load(x + i, value);
        bits_of(value, bits);
        const Ints exponent = (bits - kRootHalf) >> 23;
        from_bits(bits - (exponent << 23), m);
        const Floats t = (m - 1.0F) / (m + 1.0F);
        const Floats t2 = t * t;
        Floats series = t2 * (1.0F / 9) + 1.0F / 7;
        series = series * t2 + 1.0F / 5;
        series = series * t2 + 1.0F / 3;
        series = series * t2 + 1.0F;
        const Floats whole = __builtin_convertvector(exponent, Floats);
        store(whole * 0.693147181F + 2.0F * t * series, x + i);
    }
}

#define FMOE_DEFINE_KERNELS(target, suffix)                                                        \
    target void add_rows_##suffix(float* sum, const float* matrix, const int* rows,                \
                                  const float* values, int num_rows, int n) {                      \
        add_rows_body(sum, matrix, rows, values, num_rows, n);                                     \
    }                                                                                              \
    target void add_product_##suffix(float* sum, const float* a, const float* b, int n) {          \
        add_product_body(sum, a, b, n);                                                            \
    }                                                                                              \
    target float dot_##suffix(const float* a, const float* b, int n) { return dot_body(a, b, n); } \
    target void descend_rows_##suffix(                                                             \
        float* matrix, float* squares, const int* rows, const float* values, int num_rows, int n,  \
        const float* error, const Segment* segments, int num_segments, const float* mean_squares,  \
        const float* rates) {                                                                      \
        descend_rows_body(matrix, squares, rows, values, num_rows, n, error, segments,             \
                          num_segments, mean_squares, rates);                                      \
    }                                                                                              \
    target void descend_each_##suffix(float* weights, float* squares, const float* error,          \
                                      const float* input, float rate, int n) {                     \
        descend_each_body(weights, squares, error, input, rate, n);                                \
    }                                                                                              \
    target void sigmoid_##suffix(float* z, int n) { sigmoid_body(z, n); }                          \
    target void log_##suffix(float* x, int n) { log_body(x, n); }                                  \
    constexpr ModelKernels kKernels_##suffix{                                                      \
        add_rows_##suffix,     add_product_##suffix, dot_##suffix, descend_rows_##suffix,          \
        descend_each_##suffix, sigmoid_##suffix,     log_##suffix, #suffix};

FMOE_DEFINE_KERNELS(, plain)
#ifdef FMOE_HAS_X86_KERNELS
FMOE_DEFINE_KERNELS(__attribute__((target("avx2,fma"))), avx2)
#endif

const ModelKernels& choose() {
#ifdef FMOE_HAS_X86_KERNELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kKernels_avx2;
#endif
    return kKernels_plain;
}

}  // namespace

const ModelKernels& model_kernels() {
    static const ModelKernels& chosen = choose();
    return chosen;
}

const ModelKernels& plain_model_kernels() { return kKernels_plain; }

}  // namespace fmoe
