// fmoe/predictors/map_predictor.h: predicts from expert maps (paper 4.2): the most similar stored
// embedding guides layers 1..d, the most similar stored trajectory layer l + d after gate l.
//
// Settled here: a row that matches nothing (empty store, zero query, no embedding) has p = 0 and
// score 0, and nothing is published for a layer where no row matches. A row that holds a value that
// is not finite or negative is not stored.
#pragma once

#include <unordered_map>
#include <vector>

#include "fmoe/iteration_record.h"
#include "fmoe/map_store.h"
#include "fmoe/matcher.h"
#include "fmoe/predictor.h"

namespace fmoe {

// The whole method, or what the ablation of figure 12a leaves of it.
struct MapSearch {
    bool is_semantic = true;      // S: guide the first d layers
    bool publishes_score = true;  // delta: the similarity decides how many experts; without it, K
};

class MapPredictor final : public Predictor {
public:
    MapPredictor(const StoreShape& shape, int capacity, const MapSearch& search);

    void iteration_started(const IterationContext&, std::vector<Prediction>& out) override;
    void gate_observed(const GateObservation&, std::vector<Prediction>& out) override;
    void iteration_ended(std::vector<Prediction>& out) override;
    void request_ended(std::uint64_t request) override;
    MapStore* store() override { return &store_; }

private:
    void publish(int observed_layer, int first_layer, int num_layers,
                 const std::vector<Match>& matches, std::vector<Prediction>& out) const;

    MapSearch search_;
    MapStore store_;
    Matcher matcher_;
    IterationRecord record_;
    std::unordered_map<std::uint64_t, EntryRef> last_entries_;  // of each request in flight
};

}  // namespace fmoe
