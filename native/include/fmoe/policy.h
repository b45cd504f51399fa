// fmoe/policy.h: the decisions. Events in, instructions out; no clock, no I/O, no thread, so the
// same object runs in the engine and in the simulator and replays from a trace.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fmoe/expert_cache.h"
#include "fmoe/predictor.h"

namespace fmoe {

struct IterationStarted {
    std::uint64_t iteration = 0;
    int num_rows = 0;
    bool has_prefill = false;
    double layer_time = 0;  // measured compute time of one layer, in any unit
    double load_time = 0;   // measured load time of one expert, same unit
};

struct GateRequested {
    int layer = 0;
    std::span<const int> needed;  // expert indices, ascending, each once
    double backlog = 0;           // load time still queued on the link, same unit as load_time
};

struct VictimNeeded {
    int expert = 0;  // the one that comes in
    Cause cause = Cause::on_demand;
    int layer = 0;  // the layer in progress, -1 before the first
};

// What a policy may order. Evicting happens by naming a victim, so that a slot never idles.
struct Instruction {
    enum class Kind : std::uint8_t {
        start_copy,  // prefetch `expert`, into a free slot or over `victim`; only from link_free()
        cancel,      // drop the prefetch of `expert` if no gate waits for it
        hold,        // `layer` must not compute until the copy of `expert` is done or given up
    };
    Kind kind;
    int expert = 0;
    int victim = -1;
    int layer = -1;

    friend bool operator==(const Instruction&, const Instruction&) = default;

    static Instruction start_copy(int expert, int victim) {
        return {Kind::start_copy, expert, victim, -1};
    }
    static Instruction cancel(int expert) { return {Kind::cancel, expert, -1, -1}; }
    static Instruction hold(int layer, int expert) { return {Kind::hold, expert, -1, layer}; }
};

using Instructions = std::vector<Instruction>;

// Every event comes with the cache as it is now; the policy reads it and never changes it.
class Policy {
public:
    virtual ~Policy() = default;

    virtual void iteration_started(const IterationStarted&, const ExpertCache&, Instructions&) {}
    // Called before the misses among `needed` are served.
    virtual void gate_requested(const GateRequested&, const ExpertCache&, Instructions&) {}
    virtual void predicted(const Prediction&, const ExpertCache&, Instructions&) {}
    virtual void copy_done(int /*expert*/, const ExpertCache&, Instructions&) {}
    virtual void iteration_ended(const ExpertCache&, Instructions&) {}
    virtual void request_ended(std::uint64_t /*request*/, const ExpertCache&, Instructions&) {}
    // The link can take one more prefetch: at most one start_copy, none when nothing pays.
    virtual void link_free(const ExpertCache&, Instructions&) {}

    // An expert with cache.can_evict(), or -1 where every one of them had better stay; -1 is
    // refused for an on-demand load while something can be evicted.
    virtual int victim(const VictimNeeded&, const ExpertCache&) = 0;
};

}  // namespace fmoe
