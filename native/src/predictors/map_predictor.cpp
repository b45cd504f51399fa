#include "fmoe/predictors/map_predictor.h"

#include <algorithm>

namespace fmoe {

MapPredictor::MapPredictor(const StoreShape& shape, int capacity, const MapSearch& search)
    : search_(search), store_(shape, capacity), matcher_(store_), record_(shape.geometry) {}

void MapPredictor::iteration_started(const IterationContext& context,
                                     std::vector<Prediction>& out) {
    require(
        context.embeddings == nullptr || context.embedding_size == store_.shape().embedding_size,
        "fmoe: embeddings have another size than the store");
    record_.start(context);
    matcher_.start(record_.num_rows(), record_.embeddings());
    if (!search_.is_semantic) return;
    std::vector<Match> matches;
    for (int row = 0; row < record_.num_rows(); ++row)
        matches.push_back(matcher_.best_semantic(row));
    const int num_layers = std::min(store_.shape().prefetch_distance, store_.geometry().num_layers);
    publish(-1, 0, num_layers, matches, out);
}

void MapPredictor::gate_observed(const GateObservation& gate, std::vector<Prediction>& out) {
    record_.observe(gate);
    matcher_.observe(gate.layer, gate.probs);
    const int target = gate.layer + store_.shape().prefetch_distance;
    if (target >= store_.geometry().num_layers) return;
    std::vector<Match> matches;
    for (int row = 0; row < record_.num_rows(); ++row)
        matches.push_back(matcher_.best_trajectory(row));
    publish(gate.layer, target, 1, matches, out);
}

void MapPredictor::publish(int observed_layer, int first_layer, int num_layers,
                           const std::vector<Match>& matches, std::vector<Prediction>& out) const {
    const bool has_match = std::any_of(matches.begin(), matches.end(),
                                       [](const Match& match) { return match.entry >= 0; });
    if (!has_match || num_layers == 0) return;
    const int experts = store_.geometry().num_experts;
    Prediction prediction = Prediction::blank(record_.iteration(), observed_layer, first_layer,
                                              num_layers, record_.num_rows(), experts);
    for (int row = 0; row < record_.num_rows(); ++row) {
        const Match& match = matches[static_cast<std::size_t>(row)];
        if (match.entry < 0) continue;
        for (int layer = first_layer; layer < first_layer + num_layers; ++layer) {
            store_.read_probs(match.entry, layer, prediction.probs(row, layer, experts));
            prediction.score_of(row, layer) = search_.publishes_score ? match.score : 1.0f;
        }
    }
    out.push_back(std::move(prediction));
}

void MapPredictor::iteration_ended(std::vector<Prediction>&) {
    if (!record_.is_complete()) return;  // the step failed: half a map is no map
    // The search has compared whole maps by now; RDY needs just these scores.
    const bool is_full = store_.size() == store_.capacity();
    std::vector<std::vector<float>> map_scores(static_cast<std::size_t>(record_.num_rows()));
    std::vector<NewMap> batch;
    std::vector<std::uint64_t> requests;
    for (int row = 0; row < record_.num_rows(); ++row) {
        if (!record_.is_sound(row)) continue;
        NewMap map;
        map.probs = record_.probs(row);
        map.embedding = record_.embedding(row);
        map.chosen = record_.chosen(row);
        map.token_id = record_.token_id(row);
        const auto last = last_entries_.find(record_.request(row));
        if (last != last_entries_.end()) map.predecessor = last->second;
        if (is_full) {
            auto& scores = map_scores[static_cast<std::size_t>(row)];
            const auto seen = matcher_.trajectory_scores(row);
            scores.assign(seen.begin(), seen.end());
            map.map_scores = scores.data();
            map.semantic_scores = matcher_.semantic_scores(row).data();
        }
        batch.push_back(map);
        requests.push_back(record_.request(row));
    }
    const std::vector<EntryRef> refs = store_.insert(batch);
    for (std::size_t i = 0; i < refs.size(); ++i) last_entries_[requests[i]] = refs[i];
}

void MapPredictor::request_ended(std::uint64_t request) { last_entries_.erase(request); }

}  // namespace fmoe
