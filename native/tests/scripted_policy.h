// A policy that a test writes as lambdas; what is not given does nothing.
#pragma once

#include <functional>
#include <memory>

#include "fmoe/policy.h"

namespace fmoe {

struct ScriptedPolicy final : Policy {
    std::function<void(const GateRequested&, const ExpertCache&, Instructions&)> on_gate;
    std::function<void(const Prediction&, const ExpertCache&, Instructions&)> on_prediction;
    std::function<void(int, const ExpertCache&, Instructions&)> on_copy_done;
    std::function<void(const ExpertCache&, Instructions&)> on_link_free;

    void gate_requested(const GateRequested& event, const ExpertCache& cache,
                        Instructions& out) override {
        if (on_gate) on_gate(event, cache, out);
    }
    void predicted(const Prediction& prediction, const ExpertCache& cache,
                   Instructions& out) override {
        if (on_prediction) on_prediction(prediction, cache, out);
    }
    void copy_done(int expert, const ExpertCache& cache, Instructions& out) override {
        if (on_copy_done) on_copy_done(expert, cache, out);
    }
    void link_free(const ExpertCache& cache, Instructions& out) override {
        if (on_link_free) on_link_free(cache, out);
    }
    // The lowest that can be evicted.
    int victim(const VictimNeeded&, const ExpertCache& cache) override {
        for (int expert = 0; expert < cache.geometry().size(); ++expert)
            if (cache.can_evict(expert)) return expert;
        return -1;
    }
};

// Prefetches `experts` in this order whenever the link is free and a slot is.
inline std::unique_ptr<ScriptedPolicy> prefetching(std::vector<int> experts) {
    auto policy = std::make_unique<ScriptedPolicy>();
    policy->on_link_free = [experts](const ExpertCache& cache, Instructions& out) {
        for (int expert : experts) {
            if (!cache.is_absent(expert) || cache.num_free() == 0) continue;
            out.push_back(Instruction::start_copy(expert, -1));
            return;
        }
    };
    return policy;
}

}  // namespace fmoe
