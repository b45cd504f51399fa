#include "fmoe/predictors/token_votes.h"

#include <algorithm>
#include <cmath>

#include "../model_kernels.h"

namespace fmoe {
namespace {

constexpr float kPriorUses = 3.0F;
constexpr float kPriorVotes = 1.0F;
constexpr float kSharpness = 12.0F;
constexpr float kSameTokenBefore = 0.125F;

}  // namespace

TokenVotes::TokenVotes(const Geometry& geometry)
    : geometry_(geometry),
      stride_(to_lanes(geometry.num_experts)),
      is_in_previous_(static_cast<std::size_t>(geometry.size()), 0),
      counts_(static_cast<std::size_t>(geometry.num_layers) * stride_, 0.0F),
      votes_(counts_.size(), 0.0F) {}

void TokenVotes::write_features(const RoutingLog& log, std::uint64_t previous,
                                const std::vector<float>& popularity, DecodeStep& step) {
    find_uses(log, step.token_id(), previous);
    if (uses_.empty()) return;
    float most_similar = 0;
    for (const Use& use : uses_) most_similar = std::max(most_similar, use.similarity);
    std::fill(counts_.begin(), counts_.end(), 0.0F);
    std::fill(votes_.begin(), votes_.end(), 0.0F);
    float sum = 0;
    for (const Use& use : uses_) {
        const float weight = std::exp(kSharpness * (use.similarity - most_similar));
        sum += weight;
        const std::uint16_t* chosen = log.chosen(use.position);
        for (int layer = 0; layer < geometry_.num_layers; ++layer) {
            for (int k = 0; k < geometry_.top_k; ++k, ++chosen) {
                if (*chosen == DecodeStep::kNone) continue;
                const std::size_t at = static_cast<std::size_t>(layer) * stride_ + *chosen;
                counts_[at] += 1.0F;
                votes_[at] += weight;
            }
        }
    }
    float* by_token = step.feature(kByToken, 0);
    float* by_map = step.feature(kByTokenAndMap, 0);
    const float uses = static_cast<float>(uses_.size()) + kPriorUses;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        const float p = (counts_[i] + kPriorUses * popularity[i]) / uses;
        by_token[i] = p / popularity[i];
        by_map[i] = (votes_[i] + kPriorVotes * p) / ((sum + kPriorVotes) * popularity[i]);
    }
    model_kernels().log(by_token, static_cast<int>(counts_.size()));
    model_kernels().log(by_map, static_cast<int>(counts_.size()));
}

void TokenVotes::find_uses(const RoutingLog& log, std::int32_t token_id, std::uint64_t previous) {
    uses_.clear();
    const bool has_previous = log.is_kept(previous);
    if (has_previous) mark(log.chosen(previous), 1);
    for (std::uint64_t use = log.last_use(token_id);
         log.is_kept(use) && static_cast<int>(uses_.size()) < kMostUses; use = log.use_before(use))
        uses_.push_back({use, has_previous ? similarity(log, use, previous) : 0.0F});
    if (has_previous) mark(log.chosen(previous), 0);
}

void TokenVotes::mark(const std::uint16_t* chosen, std::uint8_t value) {
    for (int layer = 0; layer < geometry_.num_layers; ++layer)
        for (int k = 0; k < geometry_.top_k; ++k, ++chosen)
            if (*chosen != DecodeStep::kNone)
                is_in_previous_[geometry_.index(layer, *chosen)] = value;
}

float TokenVotes::similarity(const RoutingLog& log, std::uint64_t use,
                             std::uint64_t previous) const {
    const std::uint64_t before = log.predecessor(use);
    if (!log.is_kept(before)) return 0;
    int shared = 0;
    const std::uint16_t* chosen = log.chosen(before);
    for (int layer = 0; layer < geometry_.num_layers; ++layer)
        for (int k = 0; k < geometry_.top_k; ++k, ++chosen)
            if (*chosen != DecodeStep::kNone)
                shared += is_in_previous_[geometry_.index(layer, *chosen)];
    const float part =
        static_cast<float>(shared) / static_cast<float>(geometry_.num_layers * geometry_.top_k);
    return part + (log.token_id(before) == log.token_id(previous) ? kSameTokenBefore : 0.0F);
}

}  // namespace fmoe
