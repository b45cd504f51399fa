// fmoe/simulator.h: replays a routing trace against the planner, policy and predictor of the engine
// over a modelled link, on a virtual clock whose unit is the compute time of one layer.
//
// Link model: one link. A layer's missing experts are loaded one after the other before it
// computes; an expert whose prefetch is in flight is waited for as long as it still takes; a
// prefetch moves only while no on-demand load does and keeps its progress when overtaken.
// Prefetches decided at gate l move during the compute of layer l; a step does not overlap its own
// misses. Where a layer's experts exceed the slots they come in waves, and the layer still computes
// in 1.
//
// Not thread-safe: one owner.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "fmoe/planner.h"
#include "fmoe/prediction_recall.h"
#include "fmoe/predictor.h"
#include "fmoe/schedule.h"
#include "fmoe/simulated_link.h"
#include "fmoe/trace_feed.h"
#include "fmoe/trace_view.h"

namespace fmoe {

struct SimulatorOptions {
    int num_slots = 0;            // experts that fit at once
    double load_time = 1;         // R: of one expert
    int batch = 1;                // B: sequences that advance together
    double prediction_delay = 0;  // from an observation to the predictions made of it
    int prefetch_depth = 1;
};

// Counts are of everything run so far.
struct SimulationResult {
    std::uint64_t num_steps = 0;
    std::uint64_t num_tokens = 0;  // rows of all steps
    double time = 0;
    double compute = 0;
    double stall = 0;
    std::uint64_t decode_tokens = 0;  // rows of the steps without a prefill
    double decode_time = 0;           // of those steps
    PlannerCounters counters;
    std::array<RecallCount, PredictionRecall::kMaxDistance> recall{};
};

class Simulator {
public:
    // The arrays behind `trace` outlive the simulator. A policy that needs none comes without a
    // predictor (null).
    Simulator(const TraceView& trace, const SimulatorOptions& options,
              std::unique_ptr<Policy> policy, std::unique_ptr<Predictor> predictor);
    Simulator(const Simulator&) = delete;  // its parts refer to each other
    Simulator& operator=(const Simulator&) = delete;

    // Shows the sequences to the predictor alone, one after the other: no time passes and the cache
    // stays as it is.
    void warm_up(std::span<const Sequence> sequences);
    // The cache is carried on from run to run; it is empty before the first.
    void run(std::span<const Sequence> sequences);

    SimulationResult result() const;
    const Planner& planner() const noexcept { return planner_; }
    const Predictor* predictor() const noexcept { return predictor_.get(); }

private:
    struct Delivery {
        double due;
        const Prediction* prediction;
    };

    void run_iteration(std::span<const ScheduledRow> rows);
    void run_layer(std::span<const ScheduledRow> rows, int layer);
    void end_requests(std::span<const ScheduledRow> rows);
    void wait_for_layer(std::span<const int> needed);
    void compute_layer();
    bool is_layer_ready() const noexcept;
    void release_loaded(std::span<const int> needed);

    double next_event() const noexcept;
    void step_to(double time);
    void pass_time(double until);
    void publish_predictions();
    void deliver(const Prediction& prediction);
    void pump_commands();

    TraceView trace_;
    SimulatorOptions options_;
    Planner planner_;
    std::unique_ptr<Predictor> predictor_;
    SimulatedLink link_;
    NeededExperts needed_;
    TraceFeed feed_;
    PredictionRecall recall_;
    std::vector<Prediction> made_;    // by the last call of the predictor
    std::deque<Delivery> in_flight_;  // made, not yet known to the policy; oldest first
    std::uint64_t iteration_ = 0;     // warm-up included
    std::uint64_t num_requests_ = 0;
    std::uint64_t num_steps_ = 0;
    std::uint64_t num_tokens_ = 0;
    double now_ = 0;
    double compute_ = 0;
    double stall_ = 0;
    std::uint64_t decode_tokens_ = 0;
    double decode_time_ = 0;
};

}  // namespace fmoe
