#include "fmoe/policies/prefetch_economy.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace fmoe {
namespace {

constexpr float kLeastP = 0.02F;
constexpr double kBeyond = 0.3;
constexpr double kWrong = 0.01;
constexpr double kLoadRate = 0.02;

}  // namespace

void LinkLoad::iteration_ended(double load_time) noexcept {
    const double load = std::exchange(num_loaded_, 0) * load_time / num_layers_;
    load_ += kLoadRate * (load - load_);
}

double LinkLoad::impatience() const noexcept { return std::clamp(1.1 - 0.4 * load_, 0.2, 1.2); }

double LinkLoad::horizon() const noexcept { return std::clamp(0.3 + 0.45 * load_, 0.4, 1.4); }

PrefetchEconomy::PrefetchEconomy(const Geometry& geometry)
    : geometry_(geometry),
      urgencies_(static_cast<std::size_t>(std::min(kLookahead, geometry.num_layers - 1)) + 1, 1.0) {
}

void PrefetchEconomy::set_impatience(double impatience) {
    for (std::size_t d = 1; d < urgencies_.size(); ++d)
        urgencies_[d] = std::pow(static_cast<double>(d), -impatience);
}

int PrefetchEconomy::choose(const PrefetchOffer& offer, const NextUseEstimate& estimate,
                            const ExpertCache& cache) const {
    const double load = offer.load_time;
    const float victim_value = offer.victim < 0 ? -1.0F : estimate.values()[offer.victim];
    const double cost = offer.victim < 0 ? 0.0 : victim_value * load;
    int best = -1;
    double best_rank = 0;
    for (int d = 1; d < static_cast<int>(urgencies_.size()); ++d) {
        const double hidden = std::min(load, d - offer.passed);
        if (hidden <= 0) continue;
        const double scale = urgencies_[d] / hidden;
        const int first = geometry_.index((offer.layer + d) % geometry_.num_layers, 0);
        for (int expert = first; expert < first + geometry_.num_experts; ++expert) {
            const float p = estimate.p(expert);
            if (p < kLeastP || !cache.is_absent(expert) ||
                estimate.values()[expert] <= victim_value ||
                expert % offer.num_shards != offer.shard)
                continue;
            const double gain = p * hidden + kBeyond * estimate.value_beyond(expert, d) * load;
            const double rank = (gain - cost - kWrong * hidden * (1 - p)) * scale;
            if (rank > best_rank) {
                best_rank = rank;
                best = expert;
            }
        }
    }
    return best;
}

}  // namespace fmoe
