#include "fmoe/policies/next_use_estimate.h"

#include <algorithm>
#include <cmath>

namespace fmoe {
namespace {

constexpr float kDecay = 0.85F;
constexpr float kLongDecay = 0.98F;
constexpr float kTrustInLater = 0.7F;

// Of a use in each iteration with chance f: E[discount^n], n = 1 for the next.
float geometric(float f, float discount) { return f * discount / (1 - (1 - f) * discount); }

}  // namespace

NextUseEstimate::NextUseEstimate(const Geometry& geometry)
    : geometry_(geometry),
      discounts_(static_cast<std::size_t>(geometry.num_layers) + 1, 1.0F),
      p_(static_cast<std::size_t>(geometry.size()),
         static_cast<float>(geometry.top_k) / static_cast<float>(geometry.num_experts)),
      later_(p_.size(), 0.0F),
      frequency_(p_),
      long_frequency_(p_),
      undiscounted_(p_.size(), 0.0F),
      values_(p_.size(), 0.0F) {
    set_horizon(1.0);
}

void NextUseEstimate::set_horizon(double iterations) {
    for (int d = 0; d <= geometry_.num_layers; ++d)
        discounts_[d] = static_cast<float>(std::exp(-d / (iterations * geometry_.num_layers)));
    for (int layer = 0; layer < geometry_.num_layers; ++layer) weigh(layer);
}

void NextUseEstimate::enter_layer(int layer) {
    layer_ = layer;
    for (int any = 0; any < geometry_.num_layers; ++any) discount(any);
}

void NextUseEstimate::layer_used(int layer, std::span<const int> needed, bool counts) {
    const int begin = geometry_.index(layer, 0);
    const int end = begin + geometry_.num_experts;
    if (counts) {
        for (int expert = begin; expert < end; ++expert) {
            frequency_[expert] *= kDecay;
            long_frequency_[expert] *= kLongDecay;
        }
        for (int expert : needed) {
            frequency_[expert] += 1 - kDecay;
            long_frequency_[expert] += 1 - kLongDecay;
        }
    }
    const float whole = discounts_.back();
    for (int expert = begin; expert < end; ++expert) {
        p_[expert] = frequency_[expert];
        later_[expert] = geometric(frequency_[expert], whole) / whole;
    }
    weigh(layer);
}

void NextUseEstimate::predicted(const Prediction& prediction) {
    const int experts = geometry_.num_experts;
    for (int layer = prediction.first_layer; layer < prediction.first_layer + prediction.num_layers;
         ++layer) {
        if ((layer <= layer_) != prediction.is_next_iteration) continue;
        bool is_said = false;
        for (int row = 0; row < prediction.num_rows; ++row)
            is_said = is_said || prediction.score_of(row, layer) > 0;
        if (!is_said) continue;
        for (int j = 0; j < experts; ++j) {
            float none = 1;
            float none_later = 1;
            for (int row = 0; row < prediction.num_rows; ++row) {
                if (!(prediction.score_of(row, layer) > 0)) continue;
                const float* p = prediction.probs(row, layer, experts) + j;
                none *= 1 - *p;
                if (!prediction.later.empty())
                    none_later *=
                        1 - prediction.later[static_cast<std::size_t>(p - prediction.p.data())];
            }
            const int expert = geometry_.index(layer, j);
            p_[expert] = 1 - none;
            if (!prediction.later.empty()) later_[expert] = 1 - none_later;
        }
        weigh(layer);
    }
}

void NextUseEstimate::weigh(int layer) {
    const float whole = discounts_.back();
    const int begin = geometry_.index(layer, 0);
    for (int expert = begin; expert < begin + geometry_.num_experts; ++expert) {
        const float f = 0.5F * (frequency_[expert] + long_frequency_[expert]);
        const float rest =
            (1 - kTrustInLater) * geometric(f, whole) + kTrustInLater * whole * later_[expert];
        undiscounted_[expert] = p_[expert] + (1 - p_[expert]) * rest;
    }
    discount(layer);
}

void NextUseEstimate::discount(int layer) {
    const float factor = discounts_[distance(layer)];
    const int begin = geometry_.index(layer, 0);
    for (int expert = begin; expert < begin + geometry_.num_experts; ++expert)
        values_[expert] = factor * undiscounted_[expert];
}

}  // namespace fmoe
