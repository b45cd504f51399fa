#include "fmoe/planner.h"

#include <algorithm>
#include <utility>

namespace fmoe {

Planner::Planner(const Geometry& geometry, int num_slots, std::unique_ptr<Policy> policy,
                 int prefetch_depth)
    : cache_(geometry, num_slots), policy_(std::move(policy)), prefetch_depth_(prefetch_depth) {
    require(policy_ != nullptr, "planner: a policy is needed");
    require(prefetch_depth_ >= 1, "planner: prefetch_depth must be at least 1");
}

void Planner::begin() { offer_link(); }

void Planner::iteration_started(const IterationStarted& event) {
    release_all();
    layer_ = -1;
    iteration_ = event.iteration;
    future_holds_.clear();
    scratch_.clear();
    policy_->iteration_started(event, cache_, scratch_);
    apply(scratch_);
    offer_link();
}

GateOutcome Planner::gate_requested(const GateRequested& event) {
    release_all();
    layer_ = event.layer;
    for (int expert : event.needed) cache_.pin(expert);
    pinned_.assign(event.needed.begin(), event.needed.end());
    scratch_.clear();
    policy_->gate_requested(event, cache_, scratch_);
    apply(scratch_);

    GateOutcome outcome;
    for (int expert : event.needed) {
        if (cache_.is_unused_prefetch(expert)) ++counters_.prefetches_used;
        switch (cache_.residency(expert)) {
            case Residency::ready:
                ++outcome.hits;
                break;
            case Residency::loading:
                ++outcome.late;
                if (cache_.cause(expert) == Cause::prefetch) {
                    cache_.promote(expert);
                    --prefetches_in_flight_;
                    ++on_demand_in_flight_;
                    commands_.push_back({LinkCommand::Kind::promote, expert, cache_.slot(expert),
                                         Cause::on_demand});
                }
                break;
            case Residency::absent:
                ++outcome.misses;
                waiting_.push_back(expert);
                break;
        }
        cache_.touch(expert);
    }
    counters_.hits += outcome.hits;
    counters_.late += outcome.late;
    counters_.misses += outcome.misses;

    for (const Hold& hold : future_holds_)
        if (hold.layer == layer_ && !cache_.is_ready(hold.expert)) holds_.push_back(hold);
    std::erase_if(future_holds_, [this](const Hold& hold) { return hold.layer <= layer_; });

    serve_waiting();
    offer_link();
    return outcome;
}

void Planner::predicted(const Prediction& prediction) {
    if (prediction.iteration != iteration_) return;  // made for an iteration that is over
    scratch_.clear();
    policy_->predicted(prediction, cache_, scratch_);
    apply(scratch_);
    offer_link();
}

void Planner::copy_done(int expert) {
    FMOE_CHECK(cache_.is_loading(expert));
    if (cache_.cause(expert) == Cause::prefetch)
        --prefetches_in_flight_;
    else
        --on_demand_in_flight_;
    cache_.complete(expert);
    std::erase_if(holds_, [expert](const Hold& hold) { return hold.expert == expert; });
    scratch_.clear();
    policy_->copy_done(expert, cache_, scratch_);
    apply(scratch_);
    serve_waiting();
    offer_link();
}

void Planner::release(int expert) {
    const auto it = std::find(pinned_.begin(), pinned_.end(), expert);
    FMOE_CHECK(it != pinned_.end());
    pinned_.erase(it);
    cache_.unpin(expert);
    std::erase(waiting_, expert);
    serve_waiting();
    offer_link();  // its slot may have been the only one that a prefetch could take
}

void Planner::release_all() {
    for (int expert : pinned_) cache_.unpin(expert);
    pinned_.clear();
    waiting_.clear();
    holds_.clear();
}

void Planner::iteration_ended() {
    release_all();
    scratch_.clear();
    policy_->iteration_ended(cache_, scratch_);
    apply(scratch_);
    offer_link();
}

void Planner::request_ended(std::uint64_t request) {
    scratch_.clear();
    policy_->request_ended(request, cache_, scratch_);
    apply(scratch_);
    offer_link();
}

std::vector<LinkCommand> Planner::take_commands() { return std::exchange(commands_, {}); }

void Planner::apply(const Instructions& instructions) {
    for (const Instruction& instruction : instructions) {
        switch (instruction.kind) {
            case Instruction::Kind::start_copy:
                start_prefetch(instruction);
                break;
            case Instruction::Kind::cancel:
                cancel_prefetch(instruction.expert);
                break;
            case Instruction::Kind::hold: {
                const Hold hold{instruction.layer, instruction.expert};
                if (cache_.is_ready(hold.expert)) break;
                if (hold.layer == layer_)
                    holds_.push_back(hold);
                else
                    future_holds_.push_back(hold);
                break;
            }
        }
    }
}

void Planner::start_prefetch(const Instruction& instruction) {
    FMOE_CHECK(cache_.is_absent(instruction.expert));
    FMOE_CHECK(prefetches_in_flight_ < prefetch_depth_);
    if (cache_.num_free() == 0) {
        FMOE_CHECK(instruction.victim >= 0);
        evict(instruction.victim);
    }
    start(instruction.expert, Cause::prefetch);
}

void Planner::cancel_prefetch(int expert) {
    // By the time the order arrives the copy may be done or a gate may wait for it: then it stands.
    if (!cache_.is_loading(expert) || cache_.cause(expert) != Cause::prefetch ||
        cache_.is_pinned(expert))
        return;
    commands_.push_back({LinkCommand::Kind::cancel, expert, cache_.slot(expert), Cause::prefetch});
    cache_.cancel(expert);
    --prefetches_in_flight_;
    ++counters_.prefetches_wasted;
    ++counters_.prefetches_cancelled;
    std::erase_if(holds_, [expert](const Hold& hold) { return hold.expert == expert; });
}

void Planner::serve_waiting() {
    std::size_t served = 0;
    while (served < waiting_.size() && make_room_for(waiting_[served]))
        start(waiting_[served++], Cause::on_demand);
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(served));
}

bool Planner::make_room_for(int expert) {
    if (cache_.num_free() > 0) return true;
    const int victim = policy_->victim({expert, Cause::on_demand, layer_}, cache_);
    if (victim >= 0) {
        evict(victim);
        return true;
    }
    int prefetch = -1;
    for (int resident : cache_.residents()) {
        FMOE_CHECK(!cache_.can_evict(resident));  // the policy must give one up for a gate
        if (cache_.is_loading(resident) && cache_.cause(resident) == Cause::prefetch &&
            !cache_.is_pinned(resident))
            prefetch = std::max(prefetch, resident);
    }
    if (prefetch < 0) return false;  // every slot is pinned: the next wave
    cancel_prefetch(prefetch);
    return true;
}

// Gives the policy the link while nothing urgent uses it.
void Planner::offer_link() {
    while (on_demand_in_flight_ == 0 && waiting_.empty() &&
           prefetches_in_flight_ < prefetch_depth_) {
        const int before = prefetches_in_flight_;
        scratch_.clear();
        policy_->link_free(cache_, scratch_);
        apply(scratch_);
        if (prefetches_in_flight_ <= before) break;
    }
    drop_lapsed_holds();
}

// A hold on a copy that nobody carries out would never end.
void Planner::drop_lapsed_holds() {
    if (on_demand_in_flight_ > 0 || prefetches_in_flight_ > 0) return;
    std::erase_if(holds_, [this](const Hold& hold) { return !cache_.is_loading(hold.expert); });
}

void Planner::evict(int expert) {
    if (cache_.is_unused_prefetch(expert)) ++counters_.prefetches_wasted;
    cache_.evict(expert);
    ++counters_.evictions;
}

void Planner::start(int expert, Cause cause) {
    const int slot = cache_.reserve(expert, cause);
    if (cause == Cause::prefetch) {
        ++prefetches_in_flight_;
        ++counters_.prefetch_loads;
    } else {
        ++on_demand_in_flight_;
        ++counters_.on_demand_loads;
    }
    commands_.push_back({LinkCommand::Kind::start, expert, slot, cause});
}

void Planner::check_integrity() const {
    cache_.check_integrity();
    int on_demand = 0;
    int prefetches = 0;
    for (int expert : cache_.residents()) {
        if (!cache_.is_loading(expert)) continue;
        (cache_.cause(expert) == Cause::prefetch ? prefetches : on_demand) += 1;
    }
    FMOE_CHECK(on_demand == on_demand_in_flight_);
    FMOE_CHECK(prefetches == prefetches_in_flight_);
    int pins = 0;
    for (int expert = 0; expert < cache_.geometry().size(); ++expert)
        pins += cache_.is_pinned(expert);
    FMOE_CHECK(pins == static_cast<int>(pinned_.size()));
    for (int expert : waiting_) FMOE_CHECK(cache_.is_absent(expert) && cache_.is_pinned(expert));
}

}  // namespace fmoe
