// packed_queries.h: vectors of length 1 whose products with many stored vectors are wanted, laid
// out so that each block of these is read and converted once for all of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "fmoe/half.h"
#include "similarity_kernels.h"

namespace fmoe {

// Q queries of T terms each.
class PackedQueries {
public:
    PackedQueries(int num_queries, int num_terms);

    int num_queries() const noexcept { return num_queries_; }
    int num_terms() const noexcept { return num_terms_; }
    // The vector [T] is scaled to length 1. Zeros for null and for a vector without a direction
    // (zero or not finite).
    void set(int query, const float* vector);
    // Before scaling; 0 without a direction.
    double length(int query) const noexcept { return lengths_[static_cast<std::size_t>(query)]; }
    float value(int query, int term) const noexcept { return values_[index(query, term)]; }

    // sums[q, c] = query q times the stored vector c < kColumnBlock, whose term t lies at
    // columns[t * stride + c]. `next`: what will be asked about after this, fetched ahead.
    void multiply(const Half* columns, std::size_t stride, const Half* next, float* sums) const;
    // The same, where fill(first, count, panel) writes terms [first, first + count) of the vectors,
    // as SimilarityKernels::unpack does.
    template <class Fill>
    void multiply_panels(const Fill& fill, float* sums) const {
        static_assert(kColumnBlock <= kLongestSum);
        alignas(64) float panel[kColumnBlock * kColumnBlock];
        std::fill_n(sums, static_cast<std::size_t>(num_queries_) * kColumnBlock, 0.0f);
        for (int first = 0; first < num_terms_; first += kColumnBlock) {
            const int count = std::min(kColumnBlock, num_terms_ - first);
            fill(first, count, panel);
            similarity_kernels().multiply(values_.data() + index(0, first),
                                          static_cast<std::size_t>(num_queries_), num_queries_,
                                          panel, count, sums);
        }
    }

private:
    std::size_t index(int query, int term) const noexcept {
        return static_cast<std::size_t>(term) * static_cast<std::size_t>(num_queries_) +
               static_cast<std::size_t>(query);
    }

    int num_queries_;
    int num_terms_;
    std::vector<float> values_;  // [T, Q]
    std::vector<double> lengths_;
};

}  // namespace fmoe
