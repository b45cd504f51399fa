// fmoe/planner.h: joins cache and policy. It serves misses ahead of everything, applies the
// policy's instructions and says what the link has to do. Shared by engine and simulator; one
// owner.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fmoe/expert_cache.h"
#include "fmoe/policy.h"

namespace fmoe {

// An order to the link. Commands are carried out in sequence.
struct LinkCommand {
    enum class Kind : std::uint8_t {
        start,    // copy `expert` into `slot`
        promote,  // a gate waits for this prefetch now: continue it as on-demand
        cancel,   // stop copying `expert`; its slot may be reused at once
    };
    Kind kind;
    int expert = 0;
    int slot = -1;
    Cause cause = Cause::on_demand;
};

struct GateOutcome {
    int hits = 0;    // ready when the gate asked
    int late = 0;    // requested, not ready
    int misses = 0;  // not requested
};

struct PlannerCounters {
    std::uint64_t hits = 0;
    std::uint64_t late = 0;
    std::uint64_t misses = 0;
    std::uint64_t on_demand_loads = 0;
    std::uint64_t prefetch_loads = 0;
    std::uint64_t prefetches_used = 0;
    std::uint64_t prefetches_wasted = 0;     // evicted or cancelled before any gate asked
    std::uint64_t prefetches_cancelled = 0;  // of those, stopped before the copy was done
    std::uint64_t evictions = 0;
};

class Planner {
public:
    // prefetch_depth: prefetches the link is given at once (1 models a link without latency).
    Planner(const Geometry& geometry, int num_slots, std::unique_ptr<Policy> policy,
            int prefetch_depth = 1);

    const ExpertCache& cache() const noexcept { return cache_; }
    const PlannerCounters& counters() const noexcept { return counters_; }

    // Before the first event: offers the idle link to the policy.
    void begin();
    void iteration_started(const IterationStarted& event);
    // `needed` ascending, each once. Pins them until released. When they exceed the slots that can
    // be had, the rest is started as slots come free (waves): release what was computed.
    GateOutcome gate_requested(const GateRequested& event);
    void predicted(const Prediction& prediction);
    void copy_done(int expert);
    // The layer has finished reading this expert of the current gate.
    void release(int expert);
    // Releases whatever the current gate still pins. Called before the next gate and by a failed
    // step.
    void release_all();
    void iteration_ended();
    void request_ended(std::uint64_t request);

    // True while a copy that the policy made the current layer wait for is neither done nor given
    // up.
    bool is_held() const noexcept { return !holds_.empty(); }
    // Needed experts of the current gate that have no slot yet.
    int num_waiting() const noexcept { return static_cast<int>(waiting_.size()); }
    int num_on_demand_in_flight() const noexcept { return on_demand_in_flight_; }
    int num_prefetches_in_flight() const noexcept { return prefetches_in_flight_; }

    // Orders since the last call, oldest first.
    std::vector<LinkCommand> take_commands();

    void check_integrity() const;

private:
    struct Hold {
        int layer;
        int expert;
    };

    void apply(const Instructions& instructions);
    void start_prefetch(const Instruction& instruction);
    void cancel_prefetch(int expert);
    void serve_waiting();
    bool make_room_for(int expert);
    void offer_link();
    void drop_lapsed_holds();
    void evict(int expert);
    void start(int expert, Cause cause);

    ExpertCache cache_;
    std::unique_ptr<Policy> policy_;
    int prefetch_depth_;
    int layer_ = -1;
    std::uint64_t iteration_ = 0;
    int on_demand_in_flight_ = 0;
    int prefetches_in_flight_ = 0;
    std::vector<int> pinned_;   // by the current gate, not yet released
    std::vector<int> waiting_;  // of those, without a slot, in order
    std::vector<Hold> holds_;   // of the current layer, copy not done
    std::vector<Hold> future_holds_;
    std::vector<LinkCommand> commands_;
    Instructions scratch_;
    PlannerCounters counters_;
};

}  // namespace fmoe
