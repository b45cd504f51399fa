#include "fmoe/predictors/expert_frequency.h"

#include <algorithm>

#include "../model_kernels.h"

namespace fmoe {
namespace {

constexpr std::uint64_t kWindow = 5000;
constexpr float kFirstIterations = 20.0F;  // that the prior K / J counts as
constexpr float kLeast = 1e-3F;

}  // namespace

ExpertFrequency::ExpertFrequency(const Geometry& geometry)
    : geometry_(geometry),
      stride_(to_lanes(geometry.num_experts)),
      p_(static_cast<std::size_t>(geometry.num_layers) * stride_, 1.0F) {
    const float prior =
        static_cast<float>(geometry.top_k) / static_cast<float>(geometry.num_experts);
    for (int layer = 0; layer < geometry.num_layers; ++layer)
        std::fill_n(p_.begin() + static_cast<std::ptrdiff_t>(layer) * stride_, geometry.num_experts,
                    std::max(prior, kLeast));
}

void ExpertFrequency::add(const DecodeStep& step) {
    const auto seen = static_cast<float>(std::min(num_added_++, kWindow));
    decay_towards(geometry_, step, 1.0F - 1.0F / (seen + kFirstIterations), p_);
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
        float* p = p_.data() + static_cast<std::ptrdiff_t>(layer) * stride_;
        for (int j = 0; j < geometry_.num_experts; ++j) p[j] = std::max(p[j], kLeast);
        std::fill(p + geometry_.num_experts, p + stride_, 1.0F);
    }
}

void decay_towards(const Geometry& geometry, const DecodeStep& step, float decay,
                   std::vector<float>& e) {
    const int stride = to_lanes(geometry.num_experts);
    for (float& value : e) value *= decay;
    for (int layer = 0; layer < geometry.num_layers; ++layer) {
        const std::uint16_t* chosen = step.chosen(layer);
        for (int k = 0; k < geometry.top_k; ++k)
            if (chosen[k] != DecodeStep::kNone)
                e[static_cast<std::size_t>(layer) * stride + chosen[k]] += 1.0F - decay;
    }
}

}  // namespace fmoe
