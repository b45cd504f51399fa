// fmoe/predictors/decode_step.h: one decode iteration of one request, as the online models see it.
// L layers, J experts, K chosen a layer, F features.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/geometry.h"

namespace fmoe {

// What is known of each expert of a layer before its gate is, as logarithms; 0 says nothing. `pop`
// is the expert's long-run frequency.
enum Feature : int {
    kByToken,        // log(p / pop), p: how often the expert was chosen at the token's last uses
    kByTokenAndMap,  // the same, uses weighted by how much the map before each resembles ours
    kRecent,         // log(e / pop + 0.02), e: the request's decayed frequency, 0.75
    kLongRecent,     // the same, 0.95
    kSpeculative,    // log(q / its K-th largest), q: the layer's gate on the hidden state before it
    kNumFeatures,
};

class DecodeStep {
public:
    static constexpr std::uint16_t kNone = 0xffff;  // fewer than K were chosen

    explicit DecodeStep(const Geometry& geometry);

    // Forgets everything: a new iteration begins.
    void start(std::int32_t token_id);
    // probs [J]; chosen [J], null: the K largest. Of more than K chosen the K most probable are
    // kept. A probability that is negative or not finite counts as 0.
    void observe(int layer, const float* probs, const std::uint8_t* chosen);
    // probs [J] of the gate of `layer`, seen one layer early.
    void speculate(int layer, const float* probs);

    std::int32_t token_id() const noexcept { return token_id_; }
    // [K], layer by layer [L, K].
    const std::uint16_t* chosen(int layer) const noexcept {
        return chosen_.data() + static_cast<std::size_t>(layer) * geometry_.top_k;
    }
    // [K]: sqrt(K * w), w the chosen experts' weights scaled to a sum of 1.
    const float* values(int layer) const noexcept {
        return values_.data() + static_cast<std::size_t>(layer) * geometry_.top_k;
    }
    // [J] and its padding; `feature` from the layer on, [L, stride].
    float* feature(Feature feature, int layer) noexcept {
        return features_.data() +
               (static_cast<std::size_t>(feature) * geometry_.num_layers + layer) * stride_;
    }
    const float* feature(Feature feature, int layer) const noexcept {
        return const_cast<DecodeStep*>(this)->feature(feature, layer);
    }

private:
    Geometry geometry_;
    int stride_;
    std::int32_t token_id_ = -1;
    std::vector<std::uint16_t> chosen_;
    std::vector<float> values_;
    std::vector<float> features_;  // [F, L, stride]
    std::vector<float> weights_;   // [J]
    std::vector<int> order_;
};

}  // namespace fmoe
