#include "fmoe/prediction_recall.h"

#include <algorithm>
#include <utility>

namespace fmoe {

void PredictionRecall::iteration_started(std::span<const ScheduledRow> rows) {
    std::erase_if(kept_,
                  [](const Kept& k) { return k.is_carried || !k.prediction.is_next_iteration; });
    for (Kept& kept : kept_) kept.is_carried = true;
    requests_before_ = std::move(requests_);
    requests_.clear();
    for (const ScheduledRow& row : rows) requests_.push_back(row.request);
}

const Prediction& PredictionRecall::add(Prediction prediction) {
    kept_.push_back({std::move(prediction), false});
    return kept_.back().prediction;
}

void PredictionRecall::gate_observed(std::span<const ScheduledRow> rows,
                                     const GateObservation& gate) {
    for (int row = 0; row < gate.num_rows; ++row) {
        if (rows[row].is_prefill) continue;  // chooses more than K
        const Kept* scored = nullptr;
        RecallCount score_of_row;
        for (int distance = 1; distance <= kMaxDistance; ++distance) {
            const auto it = std::find_if(kept_.rbegin(), kept_.rend(), [&](const Kept& kept) {
                return speaks_of(kept, gate.layer, distance, row);
            });
            if (it == kept_.rend()) break;  // none for a larger distance either
            if (&*it != scored) score_of_row = score(it->prediction, row, gate);
            scored = &*it;
            RecallCount& count = counts_[distance - 1];
            count.chosen += score_of_row.chosen;
            count.within_top_k += score_of_row.within_top_k;
            count.within_top_2k += score_of_row.within_top_2k;
        }
    }
}

bool PredictionRecall::speaks_of(const Kept& kept, int layer, int distance, int row) const {
    const Prediction& prediction = kept.prediction;
    if (prediction.is_next_iteration != kept.is_carried || row >= prediction.num_rows) return false;
    if (kept.is_carried && requests_before_[row] != requests_[row]) return false;
    const int seen = prediction.observed_layer - (kept.is_carried ? geometry_.num_layers : 0);
    return seen <= layer - distance && layer >= prediction.first_layer &&
           layer < prediction.first_layer + prediction.num_layers;
}

RecallCount PredictionRecall::score(const Prediction& prediction, int row,
                                    const GateObservation& gate) const {
    const int J = geometry_.num_experts;
    const float* p = prediction.probs(row, gate.layer, J);
    const std::uint8_t* chosen = gate.chosen + static_cast<std::size_t>(row) * J;
    RecallCount count;
    for (int j = 0; j < J; ++j) {
        if (chosen[j] == 0) continue;
        int rank = 0;  // ties by lower index
        for (int other = 0; other < J; ++other)
            rank += p[other] > p[j] || (p[other] == p[j] && other < j);
        ++count.chosen;
        count.within_top_k += rank < geometry_.top_k;
        count.within_top_2k += rank < 2 * geometry_.top_k;
    }
    return count;
}

}  // namespace fmoe
