// model_kernels.h: the inner loops of the online models. Chosen once at start by what the processor
// can do, so that one build runs everywhere.
#pragma once

#include <cstddef>

#include "fmoe/predictors/online_model.h"

namespace fmoe {

// Vectors that a kernel walks are padded to a multiple of this, so that no loop has a tail.
inline constexpr int kLanes = 8;

constexpr int to_lanes(int size) { return (size + kLanes - 1) / kLanes * kLanes; }

// Segments that a row may have.
inline constexpr int kMostSegments = 32;

// n and the sizes of segments are multiples of kLanes throughout; no two arguments overlap.
struct ModelKernels {
    // sum[i] += sum_r values[r] * matrix[rows[r] * n + i]
    void (*add_rows)(float* sum, const float* matrix, const int* rows, const float* values,
                     int num_rows, int n);
    // sum[i] += a[i] * b[i]
    void (*add_product)(float* sum, const float* a, const float* b, int n);
    float (*dot)(const float* a, const float* b, int n);
    // One step of Adagrad with one accumulator a row and segment. Row r, fed by values[r], has in
    // segment s the gradient values[r] * error[i], of mean square values[r]^2 * mean_squares[s]:
    //     squares[row, s] += that;  weight -= rates[s] / sqrt(squares[row, s]) * gradient
    // Matrix [., n]; squares [., to_lanes(num_segments)], positive; mean_squares and rates as wide.
    void (*descend_rows)(float* matrix, float* squares, const int* rows, const float* values,
                         int num_rows, int n, const float* error, const Segment* segments,
                         int num_segments, const float* mean_squares, const float* rates);
    // Adagrad proper, where every weight has its own input: gradient error[i] * input[i].
    void (*descend_each)(float* weights, float* squares, const float* error, const float* input,
                         float rate, int n);
    // z[i] = 1 / (1 + exp(-z[i]))
    void (*sigmoid)(float* z, int n);
    // x[i] = log(x[i]) for x[i] > 0, relative error below 1e-6 away from 1.
    void (*log)(float* x, int n);
    const char* name;
};

// Thread-safe; the same table for the life of the process.
const ModelKernels& model_kernels();
// The portable table, for tests that compare the two.
const ModelKernels& plain_model_kernels();

}  // namespace fmoe
