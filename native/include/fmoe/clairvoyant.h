// fmoe/clairvoyant.h: how fast the link model can be when the future is known. Belady's victims,
// a prefetcher that knows the next gates, and a lower bound that no schedule gets under.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "fmoe/policy.h"
#include "fmoe/schedule.h"
#include "fmoe/simulator.h"
#include "fmoe/trace_view.h"

namespace fmoe {

// Every gate of a run in order, and when each expert is needed next.
class GateSequence {
public:
    using Position = std::uint32_t;
    static constexpr Position kNever = std::numeric_limits<Position>::max();

    GateSequence(const TraceView& trace, std::span<const Sequence> sequences, int batch);

    const Geometry& geometry() const noexcept { return geometry_; }
    // Rows of all iterations.
    std::size_t num_tokens() const noexcept { return num_tokens_; }
    std::size_t num_gates() const noexcept { return gate_begin_.size() - 1; }
    std::span<const int> needed(std::size_t gate) const noexcept { return slice(needed_, gate); }
    // The gate after `gate` that needs the same expert, beside needed(gate).
    std::span<const Position> next_use(std::size_t gate) const noexcept {
        return slice(next_use_, gate);
    }
    // By expert, the first gate that needs it.
    const std::vector<Position>& first_use() const noexcept { return first_use_; }

private:
    template <class T>
    std::span<const T> slice(const std::vector<T>& all, std::size_t gate) const noexcept {
        return {all.data() + gate_begin_[gate], gate_begin_[gate + 1] - gate_begin_[gate]};
    }

    Geometry geometry_;
    std::size_t num_tokens_ = 0;
    std::vector<int> needed_;
    std::vector<Position> next_use_;
    std::vector<std::size_t> gate_begin_{0};
    std::vector<Position> first_use_;
};

// Evicts what is needed farthest in the future and prefetches nothing. Plays one run of the
// sequence, from its start.
class BeladyPolicy : public Policy {
public:
    explicit BeladyPolicy(std::shared_ptr<const GateSequence> gates);

    void gate_requested(const GateRequested& event, const ExpertCache&, Instructions&) override;
    int victim(const VictimNeeded& event, const ExpertCache& cache) override;

protected:
    const GateSequence& gates() const noexcept { return *gates_; }
    std::size_t next_gate() const noexcept { return next_gate_; }
    // Among the experts that can be evicted; -1 without one. Ties by lower index.
    int farthest(const ExpertCache& cache) const;
    GateSequence::Position next_use_of(int expert) const { return next_use_[expert]; }

private:
    std::shared_ptr<const GateSequence> gates_;
    std::size_t next_gate_ = 0;
    std::vector<GateSequence::Position> next_use_;  // by expert, seen from the current gate
};

// Besides, while the link is free, prefetches what is needed next, nearest gate first, up to one
// iteration ahead, unless it would evict what is needed sooner.
class ClairvoyantPolicy final : public BeladyPolicy {
public:
    using BeladyPolicy::BeladyPolicy;
    void link_free(const ExpertCache& cache, Instructions& out) override;
};

// No schedule plays the sequence on an empty cache of `num_slots` with fewer loads.
//
// A load made before its gate can be put off to it without another load, so a schedule that loads
// on demand is among the best, and of those Belady's is. A gate that needs more experts than there
// are slots is given the room to hold them all at once, and gives up the farthest after it: that
// only helps, so the count is then a bound that may lie below what is possible.
std::uint64_t fewest_loads(const GateSequence& gates, int num_slots);

struct ClairvoyantBounds {
    double belady = 0;            // time of Belady without prefetch
    double perfect_prefetch = 0;  // of Belady with perfect prefetch
    double clairvoyant = 0;       // the better of the two
    double lower_bound = 0;       // max(compute, fewest loads * load time): below every schedule
    std::uint64_t fewest_loads = 0;
    std::uint64_t num_tokens = 0;  // rows of all steps
};

// Times are of the whole run. Only slots, load time and batch of the options matter.
ClairvoyantBounds clairvoyant_bounds(const TraceView& trace, std::span<const Sequence> sequences,
                                     const SimulatorOptions& options);

}  // namespace fmoe
