#include "fmoe/predictors/decode_step.h"

#include <algorithm>
#include <cmath>

#include "../model_kernels.h"

namespace fmoe {
namespace {

constexpr float kLargestMargin = 4.0F;
constexpr float kLeastProbability = 1e-9F;

float sound(float p) { return std::isfinite(p) && p > 0 ? p : 0.0F; }

}  // namespace

DecodeStep::DecodeStep(const Geometry& geometry)
    : geometry_(geometry),
      stride_(to_lanes(geometry.num_experts)),
      chosen_(static_cast<std::size_t>(geometry.num_layers) * geometry.top_k, kNone),
      values_(chosen_.size(), 0.0F),
      features_(static_cast<std::size_t>(kNumFeatures) * geometry.num_layers * stride_, 0.0F),
      weights_(static_cast<std::size_t>(geometry.num_experts), 0.0F) {
    require(geometry.num_experts < kNone, "fmoe+: at most 65534 experts a layer");
}

void DecodeStep::start(std::int32_t token_id) {
    token_id_ = token_id;
    std::fill(chosen_.begin(), chosen_.end(), kNone);
    std::fill(values_.begin(), values_.end(), 0.0F);
    std::fill(features_.begin(), features_.end(), 0.0F);
}

void DecodeStep::observe(int layer, const float* probs, const std::uint8_t* chosen) {
    std::transform(probs, probs + geometry_.num_experts, weights_.begin(), sound);
    order_.clear();
    for (int j = 0; j < geometry_.num_experts; ++j)
        if (chosen == nullptr || chosen[j] != 0) order_.push_back(j);
    const auto kept = std::min(order_.size(), static_cast<std::size_t>(geometry_.top_k));
    if (kept < order_.size())
        std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept),
                          order_.end(), [this](int a, int b) {
                              return weights_[a] > weights_[b] ||
                                     (weights_[a] == weights_[b] && a < b);
                          });
    float sum = 0;
    for (std::size_t k = 0; k < kept; ++k) sum += weights_[order_[k]];
    const std::size_t begin = static_cast<std::size_t>(layer) * geometry_.top_k;
    for (std::size_t k = 0; k < kept; ++k) {
        // All weights 0: the gate says whom it chose and nothing more.
        const float share = sum > 0 ? weights_[order_[k]] / sum : 1.0F / static_cast<float>(kept);
        chosen_[begin + k] = static_cast<std::uint16_t>(order_[k]);
        values_[begin + k] = std::sqrt(share * static_cast<float>(geometry_.top_k));
    }
}

void DecodeStep::speculate(int layer, const float* probs) {
    std::transform(probs, probs + geometry_.num_experts, weights_.begin(),
                   [](float p) { return std::max(sound(p), kLeastProbability); });
    std::vector<float> sorted = weights_;
    std::nth_element(sorted.begin(), sorted.begin() + (geometry_.top_k - 1), sorted.end(),
                     std::greater<>());
    const float threshold = sorted[static_cast<std::size_t>(geometry_.top_k - 1)];
    float* margins = feature(kSpeculative, layer);
    for (int j = 0; j < geometry_.num_experts; ++j)
        margins[j] = std::clamp(std::log(weights_[j] / threshold), -kLargestMargin, kLargestMargin);
}

}  // namespace fmoe
