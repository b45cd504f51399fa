#include "fmoe/policies/plus_policy.h"

#include <algorithm>
#include <utility>

namespace fmoe {

PlusPolicy::PlusPolicy(const PolicyParams& params, std::unique_ptr<Eviction> eviction)
    : geometry_(params.geometry),
      shard_(params.shard),
      num_shards_(params.num_shards),
      eviction_(std::move(eviction)),
      estimate_(params.geometry),
      economy_(params.geometry),
      link_load_(params.geometry.num_layers),
      guard_(params.geometry, std::min(params.num_slots, params.geometry.size())) {}

void PlusPolicy::iteration_started(const IterationStarted& event, const ExpertCache&,
                                   Instructions&) {
    layer_ = -1;
    heard_layer_ = -2;
    is_behind_ = false;
    has_prefill_ = event.has_prefill;
    // Before the first measurements a load is taken to be as long as a layer.
    const bool is_measured = event.layer_time > 0 && event.load_time > 0;
    layer_time_ = is_measured ? event.layer_time : 1;
    load_time_ = is_measured ? event.load_time / event.layer_time : 1;
    passed_ = 1;  // nothing computes yet: layer 0 comes at once
    carried_ = 0;
    economy_.set_impatience(link_load_.impatience());
    estimate_.set_horizon(link_load_.horizon());
    estimate_.enter_layer(-1);
}

void PlusPolicy::gate_requested(const GateRequested& event, const ExpertCache& cache,
                                Instructions&) {
    layer_ = event.layer;
    is_behind_ = heard_layer_ < layer_ - 1;
    int num_absent = 0;
    int num_late = 0;
    for (int expert : event.needed) {
        num_absent += cache.is_absent(expert);
        num_late += cache.is_loading(expert);
    }
    const double backlog = event.backlog / layer_time_;
    const double late = std::min(backlog, num_late * load_time_);
    guard_.gate(event.needed, load_time_, num_absent * load_time_ + late);
    link_load_.loaded(num_absent);
    passed_ = 0;
    carried_ = backlog - late;
    if (eviction_ != nullptr) eviction_->used(event.needed);
    estimate_.enter_layer(layer_);
    estimate_.layer_used(layer_, event.needed, !has_prefill_);
}

void PlusPolicy::predicted(const Prediction& prediction, const ExpertCache&, Instructions&) {
    estimate_.predicted(prediction);
    const bool is_last = layer_ == geometry_.num_layers - 1 && prediction.first_layer == layer_;
    if (!prediction.is_next_iteration || is_last) heard_layer_ = prediction.observed_layer;
}

void PlusPolicy::copy_done(int expert, const ExpertCache& cache, Instructions&) {
    if (eviction_ != nullptr) eviction_->loaded(expert);
    if (!cache.is_unused_prefetch(expert)) return;
    passed_ += carried_ > 0 ? std::exchange(carried_, 0.0) : load_time_;
}

void PlusPolicy::iteration_ended(const ExpertCache&, Instructions&) {
    if (eviction_ != nullptr) eviction_->iteration_ended();
    guard_.iteration_ended();
    link_load_.iteration_ended(load_time_);
}

// Its words on the gate in progress come in a moment; a copy begun without them may be the wrong
// one and keeps the link. A prefill gets none beyond those at its start.
bool PlusPolicy::awaits_prediction() const noexcept {
    return heard_layer_ < layer_ && !is_behind_ && !has_prefill_;
}

void PlusPolicy::link_free(const ExpertCache& cache, Instructions& out) {
    if (guard_.is_on() || awaits_prediction()) return;
    PrefetchOffer offer;
    offer.layer = layer_;
    offer.passed = std::min(passed_, 1.0);
    offer.load_time = load_time_;
    offer.shard = shard_;
    offer.num_shards = num_shards_;
    if (cache.num_free() == 0) {
        offer.victim =
            eviction_ != nullptr ? eviction_->victim(cache) : lowest_outside_layer(cache);
        if (offer.victim < 0) return;
    }
    const int expert = economy_.choose(offer, estimate_, cache);
    if (expert < 0) return;
    link_load_.loaded(1);
    out.push_back(Instruction::start_copy(expert, note_victim(offer.victim, cache)));
}

int PlusPolicy::victim(const VictimNeeded&, const ExpertCache& cache) {
    if (eviction_ != nullptr) return note_victim(eviction_->victim(cache), cache);
    return note_victim(
        guard_.is_on() ? guard_.victim(cache) : lowest(cache, estimate_.values(), {}), cache);
}

// The layer in progress may still be reading, and what it read is not in the way of others.
int PlusPolicy::lowest_outside_layer(const ExpertCache& cache) const {
    const std::vector<float>& values = estimate_.values();
    int best = -1;
    for (int expert : cache.residents()) {
        if (best >= 0 &&
            (values[expert] > values[best] || (values[expert] == values[best] && expert > best)))
            continue;
        if (cache.can_evict(expert) && geometry_.layer_of(expert) != layer_) best = expert;
    }
    return best;
}

int PlusPolicy::note_victim(int victim, const ExpertCache& cache) {
    if (victim >= 0 && cache.is_unused_prefetch(victim)) link_load_.wasted();
    return victim;
}

}  // namespace fmoe
