// fmoe/policies/next_use_estimate.h: what it is worth to hold an expert: the expected discounted
// time of its next use.
//
// With d layers until the expert's layer comes next, g = exp(-1 / (tau L)) a layer,
//     value = g^d (p + (1 - p) rest)
//     rest  = 0.3 geometric + 0.7 g^L later
// p: predicted for that next iteration of the layer; later: predicted for the iterations after it,
// if it does without; geometric: the same from frequency alone, f g^L / (1 - (1 - f) g^L). Where
// nothing is predicted, p is the decayed frequency and later its geometric.
#pragma once

#include <span>
#include <vector>

#include "fmoe/geometry.h"
#include "fmoe/predictor.h"

namespace fmoe {

class NextUseEstimate {
public:
    explicit NextUseEstimate(const Geometry& geometry);

    // tau, in iterations: how far the future counts.
    void set_horizon(double iterations);
    // The layer in progress, -1 before the first, moves on.
    void enter_layer(int layer);
    // Its gate asks for `needed`; from now on the layer's next use is in the next iteration.
    // A prefill says little of what decoding uses: `counts` false leaves frequencies as they are.
    void layer_used(int layer, std::span<const int> needed, bool counts);
    // Rows of a batch are independent: p = 1 - prod(1 - p_row). A row of score 0 says nothing.
    // Ignores what speaks of a layer's use that is over, or not the next.
    void predicted(const Prediction& prediction);

    // Layers until the layer's next use; 0 for the layer in progress before it was used is never
    // asked: entering a layer uses it.
    int distance(int layer) const noexcept {
        return layer > layer_ ? layer - layer_ : layer - layer_ + geometry_.num_layers;
    }
    float p(int expert) const noexcept { return p_[expert]; }
    const std::vector<float>& values() const noexcept { return values_; }
    // Of the value, the part of uses after the next.
    float value_beyond(int expert, int distance) const noexcept {
        return values_[expert] - discounts_[distance] * p_[expert];
    }

private:
    void weigh(int layer);
    void discount(int layer);

    Geometry geometry_;
    int layer_ = -1;
    std::vector<float> discounts_;       // g^d, d = 0 .. L
    std::vector<float> p_;               // [L * J]
    std::vector<float> later_;           // [L * J], 1 for a use one iteration after the next
    std::vector<float> frequency_;       // decayed, 0.85
    std::vector<float> long_frequency_;  // 0.98
    std::vector<float> undiscounted_;    // p + (1 - p) rest
    std::vector<float> values_;
};

}  // namespace fmoe
