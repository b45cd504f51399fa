// fmoe/policies/plus_policy.h: policy fmoe+. Holds what is worth most (NextUseEstimate), prefetches
// what pays most (PrefetchEconomy), and is never much slower than lru or ema (FloorGuard).
#pragma once

#include <memory>

#include "fmoe/eviction.h"
#include "fmoe/policies/floor_guard.h"
#include "fmoe/policies/next_use_estimate.h"
#include "fmoe/policies/prefetch_economy.h"
#include "fmoe/policy_factory.h"

namespace fmoe {

class PlusPolicy final : public Policy {
public:
    // eviction: names victims in place of the estimate; null: the policy's own.
    PlusPolicy(const PolicyParams& params, std::unique_ptr<Eviction> eviction);

    void iteration_started(const IterationStarted&, const ExpertCache&, Instructions&) override;
    void gate_requested(const GateRequested&, const ExpertCache&, Instructions&) override;
    void predicted(const Prediction&, const ExpertCache&, Instructions&) override;
    void copy_done(int expert, const ExpertCache&, Instructions&) override;
    void iteration_ended(const ExpertCache&, Instructions&) override;
    void link_free(const ExpertCache&, Instructions&) override;
    int victim(const VictimNeeded&, const ExpertCache&) override;

    // True: predictions do not pay now, lru or ema decides.
    bool is_on_floor() const noexcept { return guard_.is_on(); }

private:
    bool awaits_prediction() const noexcept;
    int lowest_outside_layer(const ExpertCache& cache) const;
    int note_victim(int victim, const ExpertCache& cache);

    Geometry geometry_;
    int shard_;
    int num_shards_;
    std::unique_ptr<Eviction> eviction_;
    NextUseEstimate estimate_;
    PrefetchEconomy economy_;
    LinkLoad link_load_;
    FloorGuard guard_;

    int layer_ = -1;
    bool has_prefill_ = false;
    double layer_time_ = 1;
    double load_time_ = 1;    // R, in layer times
    int heard_layer_ = -2;    // the newest gate whose predictions came; -1: the start's
    bool is_behind_ = false;  // the predictor is: what it said of earlier gates must do
    double passed_ = 0;       // link time spent on prefetches in this layer
    double carried_ = 0;      // what a prefetch in flight still took when the layer began
};

}  // namespace fmoe
