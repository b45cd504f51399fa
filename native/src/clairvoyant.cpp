#include "fmoe/clairvoyant.h"

#include <algorithm>
#include <queue>
#include <string>
#include <utility>

namespace fmoe {

GateSequence::GateSequence(const TraceView& trace, std::span<const Sequence> sequences, int batch)
    : geometry_(trace.geometry) {
    const Schedule schedule(trace, sequences, batch);
    num_tokens_ = schedule.num_rows();
    const std::size_t num_gates = schedule.num_iterations() * geometry_.num_layers;
    require(num_gates < kNever, "clairvoyant: a trace of " + std::to_string(num_gates) +
                                    " gates is too long; simulate fewer sequences");
    NeededExperts needed(trace);
    for (std::size_t i = 0; i < schedule.num_iterations(); ++i) {
        for (int layer = 0; layer < geometry_.num_layers; ++layer) {
            const auto experts = needed.of(schedule.rows(i), layer);
            needed_.insert(needed_.end(), experts.begin(), experts.end());
            gate_begin_.push_back(needed_.size());
        }
    }
    first_use_.assign(static_cast<std::size_t>(geometry_.size()), kNever);
    next_use_.resize(needed_.size());
    for (std::size_t gate = num_gates; gate-- > 0;) {
        for (std::size_t i = gate_begin_[gate]; i < gate_begin_[gate + 1]; ++i)
            next_use_[i] = std::exchange(first_use_[needed_[i]], static_cast<Position>(gate));
    }
}

BeladyPolicy::BeladyPolicy(std::shared_ptr<const GateSequence> gates)
    : gates_(std::move(gates)), next_use_(gates_->first_use()) {}

void BeladyPolicy::gate_requested(const GateRequested& event, const ExpertCache&, Instructions&) {
    FMOE_CHECK(next_gate_ < gates_->num_gates());
    FMOE_CHECK(std::ranges::equal(event.needed, gates_->needed(next_gate_)));
    const auto next_use = gates_->next_use(next_gate_);
    for (std::size_t i = 0; i < event.needed.size(); ++i) next_use_[event.needed[i]] = next_use[i];
    ++next_gate_;
}

int BeladyPolicy::victim(const VictimNeeded&, const ExpertCache& cache) { return farthest(cache); }

int BeladyPolicy::farthest(const ExpertCache& cache) const {
    int best = -1;
    for (int expert : cache.residents()) {
        if (!cache.can_evict(expert)) continue;
        const bool is_farther = best < 0 || next_use_[expert] > next_use_[best] ||
                                (next_use_[expert] == next_use_[best] && expert < best);
        if (is_farther) best = expert;
    }
    return best;
}

void ClairvoyantPolicy::link_free(const ExpertCache& cache, Instructions& out) {
    const std::size_t end =
        std::min(gates().num_gates(), next_gate() + gates().geometry().num_layers);
    for (std::size_t gate = next_gate(); gate < end; ++gate) {
        for (int expert : gates().needed(gate)) {
            if (!cache.is_absent(expert)) continue;
            int victim = -1;
            if (cache.num_free() == 0) {
                victim = farthest(cache);
                if (victim < 0 || next_use_of(victim) <= gate) return;
            }
            out.push_back(Instruction::start_copy(expert, victim));
            return;
        }
    }
}

namespace {

// Experts in the cache, by the gate that needs them next.
class BeladyCache {
public:
    explicit BeladyCache(int num_experts)
        : next_use_(static_cast<std::size_t>(num_experts)),
          is_resident_(static_cast<std::size_t>(num_experts), false) {}

    bool holds(int expert) const { return is_resident_[expert]; }

    void insert(int expert) {
        is_resident_[expert] = true;
        ++size_;
    }

    void set_next_use(int expert, GateSequence::Position next_use) {
        next_use_[expert] = next_use;
        farthest_first_.emplace(next_use, expert);
    }

    void evict_down_to(std::size_t num_slots) {
        while (size_ > num_slots) {
            FMOE_CHECK(!farthest_first_.empty());
            const auto [next_use, expert] = farthest_first_.top();
            farthest_first_.pop();
            // An entry may be of an earlier stay or an earlier use.
            if (!is_resident_[expert] || next_use_[expert] != next_use) continue;
            is_resident_[expert] = false;
            --size_;
        }
    }

private:
    std::vector<GateSequence::Position> next_use_;
    std::vector<bool> is_resident_;
    std::size_t size_ = 0;
    std::priority_queue<std::pair<GateSequence::Position, int>> farthest_first_;
};

double simulated_time(const TraceView& trace, std::span<const Sequence> sequences,
                      const SimulatorOptions& options, std::unique_ptr<Policy> policy) {
    Simulator simulator(trace, options, std::move(policy), nullptr);
    simulator.run(sequences);
    return simulator.result().time;
}

}  // namespace

std::uint64_t fewest_loads(const GateSequence& gates, int num_slots) {
    require(num_slots >= 1, "clairvoyant: at least 1 slot is needed");
    const auto capacity = static_cast<std::size_t>(num_slots);
    BeladyCache cache(gates.geometry().size());
    std::uint64_t loads = 0;
    for (std::size_t gate = 0; gate < gates.num_gates(); ++gate) {
        const auto needed = gates.needed(gate);
        const auto next_use = gates.next_use(gate);
        // While all of them must stay together, what is needed now is never the farthest.
        const bool must_stay = needed.size() <= capacity;
        for (std::size_t i = 0; i < needed.size(); ++i) {
            if (!cache.holds(needed[i])) {
                cache.insert(needed[i]);
                ++loads;
            }
            cache.set_next_use(needed[i],
                               must_stay ? static_cast<GateSequence::Position>(gate) : next_use[i]);
        }
        cache.evict_down_to(capacity);
        for (std::size_t i = 0; must_stay && i < needed.size(); ++i)
            cache.set_next_use(needed[i], next_use[i]);
    }
    return loads;
}

ClairvoyantBounds clairvoyant_bounds(const TraceView& trace, std::span<const Sequence> sequences,
                                     const SimulatorOptions& options) {
    const SimulatorOptions plain{options.num_slots, options.load_time, options.batch};
    const auto gates = std::make_shared<const GateSequence>(trace, sequences, options.batch);
    ClairvoyantBounds bounds;
    bounds.belady = simulated_time(trace, sequences, plain, std::make_unique<BeladyPolicy>(gates));
    bounds.perfect_prefetch =
        simulated_time(trace, sequences, plain, std::make_unique<ClairvoyantPolicy>(gates));
    bounds.clairvoyant = std::min(bounds.belady, bounds.perfect_prefetch);
    bounds.fewest_loads = fewest_loads(*gates, options.num_slots);
    bounds.num_tokens = gates->num_tokens();
    bounds.lower_bound = std::max(static_cast<double>(gates->num_gates()),
                                  static_cast<double>(bounds.fewest_loads) * options.load_time);
    return bounds;
}

}  // namespace fmoe
