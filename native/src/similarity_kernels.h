// similarity_kernels.h: the inner loops of the searches over half-precision columns. Chosen once
// at start by what the processor can do, so that one build runs everywhere.
#pragma once

#include <cstddef>
#include <vector>

#include "fmoe/half.h"

namespace fmoe {

// Columns are padded to this many entries, so that no loop has a tail.
inline constexpr int kColumnBlock = 64;
// No kernel adds up more products than this one after the other: a longer sum is one of such
// partial sums, so that its rounding error stays below (kLongestSum + num_partial_sums) * 2^-24 of
// what the sum of magnitudes is.
inline constexpr int kLongestSum = 64;

constexpr int num_partial_sums(int num_products) {
    return (num_products + kLongestSum - 1) / kLongestSum;
}

// Queries that a product takes at once.
inline constexpr int kMostQueries = kColumnBlock;

struct BestScore {
    int index = -1;
    float score = 0;
};

struct SimilarityKernels {
    // running[c] += sum_i weights[i] * columns[which[i] * stride + c] for c < count, where count is
    // a multiple of kColumnBlock.
    void (*accumulate)(const Half* columns, std::size_t stride, const int* which,
                       const float* weights, int num_columns, int count, float* running);
    // The largest dots[c] * scales[c], the first of equals; NaN never wins. Index -1 where count is
    // 0 or every score is NaN.
    BestScore (*best)(const float* dots, const float* scales, int count);
    // A block of a matrix product in two steps, over a panel float [terms, kColumnBlock]:
    // panel[i, c] = columns[i * stride + c]; as much at `next` is fetched ahead.
    void (*unpack)(const Half* columns, const Half* next, std::size_t stride, int num_terms,
                   float* panel);
    // sums[q * kColumnBlock + c] += sum_i queries[i * stride + q] * panel[i, c]; at most
    // kMostQueries and kLongestSum terms.
    void (*multiply)(const float* queries, std::size_t stride, int num_queries, const float* panel,
                     int num_terms, float* sums);
    const char* name;
};

// Thread-safe; the same table for the life of the process.
const SimilarityKernels& similarity_kernels();
// All that run on this processor, the portable one first, for tests that compare them.
std::vector<const SimilarityKernels*> runnable_similarity_kernels();

}  // namespace fmoe
