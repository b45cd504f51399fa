// fmoe/predictors/routing_models.h: the online models of all gates, and what they learn from.
#pragma once

#include <deque>
#include <vector>

#include "fmoe/predictors/decode_step.h"
#include "fmoe/predictors/model_plan.h"
#include "fmoe/predictors/online_model.h"

namespace fmoe {

// Consecutive decode iterations of one request, oldest first.
using StepHistory = std::deque<DecodeStep>;

// Not thread-safe: models keep activations.
class RoutingModels {
public:
    // Steps behind a sample that its models read, and after it that its labels need.
    static constexpr int kStepsBehind = 2;
    static constexpr int kStepsAfter = kHorizon;

    // Models take at most `bytes`, where the narrowest windows allow.
    RoutingModels(const Geometry& geometry, std::size_t bytes);

    const Windows& windows() const noexcept { return windows_; }

    // For the newest step, whose features are known. p [L, J] of this iteration.
    void predict_start(const StepHistory& history, float* p);
    // For the newest step, whose gates up to `layer` are known. Pointers [J] are valid until the
    // next call; in the order of blocks_after(layer).
    void predict(const StepHistory& history, int layer, std::vector<const float*>& p);
    const std::vector<Block>& blocks_after(int layer) const noexcept {
        return gates_[static_cast<std::size_t>(layer)].plan.blocks;
    }
    // Every model learns its sample of step `index`, whose gates are all known. A label that lies
    // beyond the newest step is left out.
    void learn(const StepHistory& history, std::size_t index);

private:
    struct Planned {
        ModelPlan plan;
        OnlineModel model;
    };
    Planned make(const ModelPlan& plan, std::uint32_t seed) const;
    void read(const ModelPlan& plan, const StepHistory& history, std::size_t index);
    void read_features(const ModelPlan& plan, const DecodeStep& step);
    void write_targets(const ModelPlan& plan, const StepHistory& history, std::size_t index);
    void write_later(int layer, const StepHistory& history, std::size_t index, float* targets);

    Geometry geometry_;
    Windows windows_;
    int stride_;
    std::vector<Planned> gates_;   // by layer
    std::vector<Planned> starts_;  // by group of layers
    ModelInput input_;
    std::vector<float> targets_;
};

}  // namespace fmoe
