// fmoe/predictors/speculative_predictor.h: layer l + 1's own gate on layer l's hidden state says
// what layer l + 1 will ask for (Mixtral-Offloading). Where inference publishes no speculative gate
// it predicts nothing.
#pragma once

#include <vector>

#include "fmoe/predictor.h"

namespace fmoe {

class SpeculativePredictor final : public Predictor {
public:
    SpeculativePredictor(const Geometry& geometry, bool is_synchronous)
        : geometry_(geometry), is_synchronous_(is_synchronous) {}

    void iteration_started(const IterationContext& context, std::vector<Prediction>&) override {
        iteration_ = context.iteration;
    }
    void gate_observed(const GateObservation&, std::vector<Prediction>& out) override;
    void iteration_ended(std::vector<Prediction>&) override {}
    void request_ended(std::uint64_t) override {}
    bool is_synchronous() const override { return is_synchronous_; }
    bool wants_speculative() const override { return true; }

private:
    Geometry geometry_;
    bool is_synchronous_;
    std::uint64_t iteration_ = 0;
};

}  // namespace fmoe
