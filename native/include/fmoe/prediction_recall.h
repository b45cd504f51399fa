// fmoe/prediction_recall.h: how many of the experts that a gate chose were among the K (2K) most
// probable of the prediction in force d layers earlier.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "fmoe/predictor.h"
#include "fmoe/schedule.h"

namespace fmoe {

struct RecallCount {
    std::uint64_t chosen = 0;        // experts chosen where a prediction was in force
    std::uint64_t within_top_k = 0;  // of those, predicted among the K most probable
    std::uint64_t within_top_2k = 0;
};

class PredictionRecall {
public:
    static constexpr int kMaxDistance = 6;

    explicit PredictionRecall(const Geometry& geometry) : geometry_(geometry) {}

    // Forgets predictions of earlier iterations, except those made for this one.
    void iteration_started(std::span<const ScheduledRow> rows);
    // Returns the kept prediction; valid until the next iteration_started.
    const Prediction& add(Prediction prediction);
    void gate_observed(std::span<const ScheduledRow> rows, const GateObservation& gate);

    // Entry d - 1 is for distance d: the newest prediction that had seen no gate after l - d.
    const std::array<RecallCount, kMaxDistance>& counts() const noexcept { return counts_; }

private:
    struct Kept {
        Prediction prediction;
        bool is_carried = false;  // made in the iteration before
    };

    bool speaks_of(const Kept& kept, int layer, int distance, int row) const;
    RecallCount score(const Prediction& prediction, int row, const GateObservation& gate) const;

    Geometry geometry_;
    std::deque<Kept> kept_;                // oldest first
    std::vector<std::uint64_t> requests_;  // by row, of this iteration
    std::vector<std::uint64_t> requests_before_;
    std::array<RecallCount, kMaxDistance> counts_{};
};

}  // namespace fmoe
