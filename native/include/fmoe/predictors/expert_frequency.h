// fmoe/predictors/expert_frequency.h: how often decode iterations choose each expert, over the long
// run. p [L, stride]; its padding is 1, so that a logarithm of ratios is finite everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/predictors/decode_step.h"

namespace fmoe {

// Exponential average with a window that grows with what was seen, up to 5000 iterations; at least
// 0.001, so that no logarithm of a ratio explodes.
class ExpertFrequency {
public:
    explicit ExpertFrequency(const Geometry& geometry);
    void add(const DecodeStep& step);
    const std::vector<float>& p() const noexcept { return p_; }

private:
    Geometry geometry_;
    int stride_;
    std::uint64_t num_added_ = 0;
    std::vector<float> p_;
};

// e = decay * e + (1 - decay) * chosen, layer by layer.
void decay_towards(const Geometry& geometry, const DecodeStep& step, float decay,
                   std::vector<float>& e);

}  // namespace fmoe
