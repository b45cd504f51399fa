// The floors that prediction is measured against: on-demand loads and a rule for victims.
#pragma once

#include <memory>

#include "fmoe/eviction.h"
#include "fmoe/policy_factory.h"

namespace fmoe {

// No prefetch, so every load was a use already when its copy is done.
class OnDemandPolicy : public Policy {
public:
    explicit OnDemandPolicy(std::unique_ptr<Eviction> eviction) : eviction_(std::move(eviction)) {}
    void gate_requested(const GateRequested& event, const ExpertCache&, Instructions&) override {
        eviction_->used(event.needed);
    }
    void iteration_ended(const ExpertCache&, Instructions&) override {
        eviction_->iteration_ended();
    }
    int victim(const VictimNeeded&, const ExpertCache& cache) override {
        return eviction_->victim(cache);
    }

private:
    std::unique_ptr<Eviction> eviction_;
};

// Everything resident: loads what is absent whenever the link is free, from the first event on, and
// evicts nothing. Throws invalid_argument unless there is a slot for every hosted expert.
class NoOffloadPolicy final : public Policy {
public:
    explicit NoOffloadPolicy(const PolicyParams& params);
    void link_free(const ExpertCache& cache, Instructions& out) override;
    int victim(const VictimNeeded&, const ExpertCache&) override { return -1; }

private:
    std::vector<int> to_load_;  // hosted experts, last layer first
};

}  // namespace fmoe
