#include "packed_queries.h"

#include "unit_vector.h"

namespace fmoe {

PackedQueries::PackedQueries(int num_queries, int num_terms)
    : num_queries_(num_queries),
      num_terms_(num_terms),
      values_(static_cast<std::size_t>(num_queries) * static_cast<std::size_t>(num_terms)),
      lengths_(static_cast<std::size_t>(num_queries)) {}

void PackedQueries::set(int query, const float* vector) {
    std::vector<float> unit(static_cast<std::size_t>(num_terms_));
    lengths_[static_cast<std::size_t>(query)] = scale_to_unit(vector, num_terms_, unit.data());
    for (int t = 0; t < num_terms_; ++t)
        values_[index(query, t)] = unit[static_cast<std::size_t>(t)];
}

void PackedQueries::multiply(const Half* columns, std::size_t stride, const Half* next,
                             float* sums) const {
    const auto fill = [=, this](int first, int count, float* panel) {
        const Half* here = columns + static_cast<std::size_t>(first) * stride;
        const int then = first + count;
        const Half* ahead =
            then < num_terms_ ? columns + static_cast<std::size_t>(then) * stride : next;
        similarity_kernels().unpack(here, ahead, stride, count, panel);
    };
    multiply_panels(fill, sums);
}

}  // namespace fmoe
