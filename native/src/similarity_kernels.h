// similarity_kernels.h: the inner loops of the searches over half-precision columns. Chosen once
// at start by what the processor can do, so that one build runs everywhere.
#pragma once

#include <cstddef>

#include "fmoe/half.h"

namespace fmoe {

// Columns are padded to this many entries, so that no loop has a tail.
inline constexpr int kColumnBlock = 64;

struct BestScore {
    int index = -1;
    float score = 0;
};

struct SimilarityKernels {
    // running[c] += sum_i weights[i] * columns[which[i] * stride + c] for c < count, where count is
    // a multiple of kColumnBlock.
    void (*accumulate)(const Half* columns, std::size_t stride, const int* which,
                       const float* weights, int num_columns, int count, float* running);
    // sum_i a[i] * b[i]; size is a multiple of kColumnBlock.
    float (*dot)(const Half* a, const float* b, int size);
    // The largest dots[c] * scales[c], the first of equals; NaN never wins. Index -1 where count is
    // 0 or every score is NaN.
    BestScore (*best)(const float* dots, const float* scales, int count);
    const char* name;
};

// Thread-safe; the same table for the life of the process.
const SimilarityKernels& similarity_kernels();
// The portable table, for tests that compare the two.
const SimilarityKernels& plain_similarity_kernels();

}  // namespace fmoe
