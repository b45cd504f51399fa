// fmoe/predictors/popularity.h: how often each expert was chosen by anyone, which is what
// MoE-Infinity prefetches for the first layers.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/iteration_record.h"
#include "fmoe/predictor.h"

namespace fmoe {

// p(l, j) = rows that chose E(l, j) / rows seen.
class Popularity {
public:
    explicit Popularity(const Geometry& geometry)
        : geometry_(geometry), counts_(static_cast<std::size_t>(geometry.size()), 0) {}

    void add(const IterationRecord& record);
    // Publishes p for layers 0 .. num_layers - 1 to every row; nothing before the first add().
    void publish(std::uint64_t iteration, int num_layers, int num_rows,
                 std::vector<Prediction>& out) const;

private:
    Geometry geometry_;
    std::uint64_t num_rows_ = 0;
    std::vector<std::uint64_t> counts_;  // [L * J]
};

}  // namespace fmoe
