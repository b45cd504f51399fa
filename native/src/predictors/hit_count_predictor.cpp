#include "fmoe/predictors/hit_count_predictor.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace fmoe {

HitCountPredictor::HitCountPredictor(const Geometry& geometry, int capacity,
                                     const HitCountOptions& options)
    : options_(options),
      matrices_({geometry, 0, 0}, capacity),
      matcher_(matrices_),
      record_(geometry),
      popularity_(geometry) {}

void HitCountPredictor::iteration_started(const IterationContext& context,
                                          std::vector<Prediction>& out) {
    store_finished();
    record_.start(context);
    matcher_.start(record_.num_rows(), nullptr);
    for (int row = 0; row < record_.num_rows(); ++row)
        counts_[record_.request(row)].resize(static_cast<std::size_t>(matrices_.geometry().size()));
    if (options_.starts_popular)
        popularity_.publish(context.iteration, options_.distance, context.num_rows, out);
}

void HitCountPredictor::gate_observed(const GateObservation& gate, std::vector<Prediction>& out) {
    record_.observe(gate);
    const Geometry& geometry = matrices_.geometry();
    const int experts = geometry.num_experts;
    query_.resize(static_cast<std::size_t>(gate.num_rows) * experts);
    for (int row = 0; row < gate.num_rows; ++row) {
        Counts& counts = counts_[record_.request(row)];
        const std::uint8_t* chosen = record_.chosen(row) + geometry.index(gate.layer, 0);
        for (int j = 0; j < experts; ++j)
            counts[static_cast<std::size_t>(geometry.index(gate.layer, j))] += chosen[j] != 0;
        scale_layer(counts, gate.layer, query_.data() + static_cast<std::size_t>(row) * experts);
    }
    matcher_.observe(gate.layer, query_.data());

    const int target = gate.layer + options_.distance;
    if (target >= geometry.num_layers || matrices_.size() == 0) return;
    Prediction prediction =
        Prediction::blank(record_.iteration(), gate.layer, target, 1, gate.num_rows, experts);
    for (int row = 0; row < gate.num_rows; ++row) {
        const Match match = matcher_.best_trajectory(row);
        if (match.entry < 0) continue;
        matrices_.read_probs(match.entry, target, prediction.probs(row, target, experts));
        prediction.score_of(row, target) = 1;
    }
    out.push_back(std::move(prediction));
}

void HitCountPredictor::iteration_ended(std::vector<Prediction>&) { popularity_.add(record_); }

void HitCountPredictor::request_ended(std::uint64_t request) {
    const auto counts = counts_.find(request);
    if (counts == counts_.end()) return;
    finished_.push_back(std::move(counts->second));
    counts_.erase(counts);
}

// A request may end while an iteration of others is being matched; the store waits for its end.
void HitCountPredictor::store_finished() {
    const Geometry& geometry = matrices_.geometry();
    std::vector<float> matrix(static_cast<std::size_t>(geometry.size()));
    for (const Counts& counts : finished_) {
        for (int layer = 0; layer < geometry.num_layers; ++layer)
            scale_layer(counts, layer, matrix.data() + geometry.index(layer, 0));
        NewMap map;
        map.probs = matrix.data();
        matrices_.insert({&map, 1});
    }
    finished_.clear();
}

void HitCountPredictor::scale_layer(const Counts& counts, int layer, float* scaled) const {
    const Geometry& geometry = matrices_.geometry();
    const auto first = counts.begin() + geometry.index(layer, 0);
    const auto total = std::accumulate(first, first + geometry.num_experts, std::uint64_t{0});
    const float scale = total == 0 ? 0.0F : 1.0F / static_cast<float>(total);
    std::transform(first, first + geometry.num_experts, scaled,
                   [scale](std::uint32_t count) { return static_cast<float>(count) * scale; });
}

}  // namespace fmoe
