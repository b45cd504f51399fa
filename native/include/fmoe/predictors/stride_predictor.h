// fmoe/predictors/stride_predictor.h: ProMoE's idea, one small learned predictor a layer: from gate
// l it says what layer l + stride will choose. Asynchronous.
//
// Settled here, since a hidden state is not published: the input is the square root of gate l's
// distribution and a constant, the output one logistic unit per expert of layer l + stride, p its
// value. Trained online by AdaGrad on every row as its choice is seen, from zero, with no store.
// The first `stride` layers go without a prediction, and so does a layer until its first lesson.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/iteration_record.h"
#include "fmoe/predictor.h"

namespace fmoe {

class StridePredictor final : public Predictor {
public:
    StridePredictor(const Geometry& geometry, int stride);

    void iteration_started(const IterationContext& context, std::vector<Prediction>&) override {
        record_.start(context);
    }
    void gate_observed(const GateObservation&, std::vector<Prediction>& out) override;
    void iteration_ended(std::vector<Prediction>&) override {}
    void request_ended(std::uint64_t) override {}

private:
    void read_input(int row, int layer);
    void predict(int target, float* p) const;
    void learn(int target, const std::uint8_t* chosen);
    std::size_t weights_of(int target, int expert) const noexcept;

    Geometry geometry_;
    int stride_;
    int num_inputs_;  // J + 1
    IterationRecord record_;
    std::vector<float> input_;             // [J + 1]
    std::vector<float> output_;            // [J]
    std::vector<float> weights_;           // [L, J, J + 1] by target layer and expert
    std::vector<float> squares_;           // same, AdaGrad's sums of squared gradients
    std::vector<std::uint8_t> is_taught_;  // [L]
};

}  // namespace fmoe
