// A policy and a predictor that Python owns, where the core wants to own one. The binding keeps the
// Python objects alive for as long.
#pragma once

#include <memory>
#include <vector>

#include "fmoe/policy.h"

namespace fmoe::bindings {

class BorrowedPolicy final : public Policy {
public:
    explicit BorrowedPolicy(Policy& policy) : policy_(policy) {}
    void iteration_started(const IterationStarted& event, const ExpertCache& cache,
                           Instructions& out) override {
        policy_.iteration_started(event, cache, out);
    }
    void gate_requested(const GateRequested& event, const ExpertCache& cache,
                        Instructions& out) override {
        policy_.gate_requested(event, cache, out);
    }
    void predicted(const Prediction& prediction, const ExpertCache& cache,
                   Instructions& out) override {
        policy_.predicted(prediction, cache, out);
    }
    void copy_done(int expert, const ExpertCache& cache, Instructions& out) override {
        policy_.copy_done(expert, cache, out);
    }
    void iteration_ended(const ExpertCache& cache, Instructions& out) override {
        policy_.iteration_ended(cache, out);
    }
    void request_ended(std::uint64_t request, const ExpertCache& cache,
                       Instructions& out) override {
        policy_.request_ended(request, cache, out);
    }
    void link_free(const ExpertCache& cache, Instructions& out) override {
        policy_.link_free(cache, out);
    }
    int victim(const VictimNeeded& need, const ExpertCache& cache) override {
        return policy_.victim(need, cache);
    }

private:
    Policy& policy_;
};

class BorrowedPredictor final : public Predictor {
public:
    explicit BorrowedPredictor(Predictor& predictor) : predictor_(predictor) {}
    void iteration_started(const IterationContext& context, std::vector<Prediction>& out) override {
        predictor_.iteration_started(context, out);
    }
    void gate_observed(const GateObservation& gate, std::vector<Prediction>& out) override {
        predictor_.gate_observed(gate, out);
    }
    void iteration_ended(std::vector<Prediction>& out) override { predictor_.iteration_ended(out); }
    void request_ended(std::uint64_t request) override { predictor_.request_ended(request); }
    bool is_synchronous() const override { return predictor_.is_synchronous(); }
    MapStore* store() override { return predictor_.store(); }
    bool wants_speculative() const override { return predictor_.wants_speculative(); }
    bool needs_speculative() const override { return predictor_.needs_speculative(); }
    std::unique_ptr<Predictor> clone() const override { return predictor_.clone(); }
    bool can_clone() const override { return predictor_.can_clone(); }

private:
    Predictor& predictor_;
};

}  // namespace fmoe::bindings
