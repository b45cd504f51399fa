#include "fmoe/predictors/routing_models.h"

#include <algorithm>
#include <cmath>

#include "../model_kernels.h"

namespace fmoe {
namespace {

constexpr float kUnknown = -1.0F;

// Where the weights of the features begin: what they say of this iteration is trusted from the
// start, so that a blank model predicts by token and recent use.
std::vector<float> feature_weights(const ModelPlan& plan) {
    std::vector<float> weights;
    for (const Block& block : plan.blocks) {
        const bool is_now = block.question == Question::this_iteration;
        weights.insert(weights.end(),
                       {is_now ? 0.3F : 0.0F, is_now ? 0.4F : 0.0F, 0.15F, 0.15F, 0.5F});
    }
    return weights;
}

}  // namespace

RoutingModels::RoutingModels(const Geometry& geometry, std::size_t bytes)
    : geometry_(geometry),
      windows_(Windows::within(geometry, bytes)),
      stride_(to_lanes(geometry.num_experts)) {
    for (int layer = 0; layer < geometry.num_layers; ++layer)
        gates_.push_back(make(gate_plan(geometry, windows_, layer), gates_.size()));
    for (int first = 0; first < geometry.num_layers; first += windows_.start_group)
        starts_.push_back(
            make(start_plan(geometry, windows_, first), gates_.size() + starts_.size()));
}

RoutingModels::Planned RoutingModels::make(const ModelPlan& plan, std::uint32_t seed) const {
    const float prior =
        std::clamp(static_cast<float>(geometry_.top_k) / static_cast<float>(geometry_.num_experts),
                   1e-3F, 0.99F);
    return {plan, OnlineModel(shape_of(plan, geometry_, windows_), prior, feature_weights(plan),
                              12345 + 77 * seed)};
}

void RoutingModels::predict_start(const StepHistory& history, float* p) {
    for (Planned& start : starts_) {
        read(start.plan, history, history.size() - 1);
        const float* predicted = start.model.predict(input_);
        for (const Block& block : start.plan.blocks) {
            std::copy_n(predicted, geometry_.num_experts, p + geometry_.index(block.layer, 0));
            predicted += stride_;
        }
    }
}

void RoutingModels::predict(const StepHistory& history, int layer, std::vector<const float*>& p) {
    Planned& gate = gates_[static_cast<std::size_t>(layer)];
    read(gate.plan, history, history.size() - 1);
    const float* predicted = gate.model.predict(input_);
    p.clear();
    for (std::size_t b = 0; b < gate.plan.blocks.size(); ++b, predicted += stride_)
        p.push_back(predicted);
}

void RoutingModels::learn(const StepHistory& history, std::size_t index) {
    for (std::vector<Planned>* models : {&gates_, &starts_}) {
        for (Planned& planned : *models) {
            read(planned.plan, history, index);
            write_targets(planned.plan, history, index);
            planned.model.learn(input_, targets_.data());
        }
    }
}

void RoutingModels::read(const ModelPlan& plan, const StepHistory& history, std::size_t index) {
    input_.clear();
    int first_row = 0;
    for (const GateInput& gate : plan.gates) {
        if (static_cast<std::size_t>(gate.age) <= index) {
            const DecodeStep& step = history[index - static_cast<std::size_t>(gate.age)];
            const std::uint16_t* chosen = step.chosen(gate.layer);
            const float* values = step.values(gate.layer);
            for (int k = 0; k < geometry_.top_k; ++k)
                if (chosen[k] != DecodeStep::kNone)
                    input_.add_row(first_row + chosen[k], values[k]);
        }
        first_row += geometry_.num_experts;
    }
    const DecodeStep& step = history[index];
    for (int layer : plan.dense_layers) {
        const float* feature = step.feature(kByTokenAndMap, layer);
        input_.dense.insert(input_.dense.end(), feature, feature + geometry_.num_experts);
    }
    read_features(plan, step);
}

// A token speaks of its own iteration only.
void RoutingModels::read_features(const ModelPlan& plan, const DecodeStep& step) {
    for (const Block& block : plan.blocks) {
        const bool is_now = block.question == Question::this_iteration;
        const bool is_speculated = is_now && block.layer == plan.speculated_layer;
        input_.features.insert(
            input_.features.end(),
            {is_now ? step.feature(kByToken, block.layer) : nullptr,
             is_now ? step.feature(kByTokenAndMap, block.layer) : nullptr,
             step.feature(kRecent, block.layer), step.feature(kLongRecent, block.layer),
             is_speculated ? step.feature(kSpeculative, block.layer) : nullptr});
    }
}

void RoutingModels::write_targets(const ModelPlan& plan, const StepHistory& history,
                                  std::size_t index) {
    targets_.assign(plan.blocks.size() * static_cast<std::size_t>(stride_), kUnknown);
    float* targets = targets_.data();
    for (const Block& block : plan.blocks) {
        if (block.question == Question::later) {
            write_later(block.layer, history, index, targets);
        } else {
            const std::size_t source = index + (block.question == Question::next_iteration);
            if (source < history.size()) {
                std::fill_n(targets, geometry_.num_experts, 0.0F);
                const std::uint16_t* chosen = history[source].chosen(block.layer);
                for (int k = 0; k < geometry_.top_k; ++k)
                    if (chosen[k] != DecodeStep::kNone) targets[chosen[k]] = 1.0F;
            }
        }
        targets += stride_;
    }
}

// exp(-(n - 2)) of the first use n >= 2 iterations on; not known of what the next iteration uses,
// nor before the whole horizon is.
void RoutingModels::write_later(int layer, const StepHistory& history, std::size_t index,
                                float* targets) {
    if (index + kHorizon >= history.size()) return;
    std::fill_n(targets, geometry_.num_experts, 0.0F);
    for (int n = kHorizon; n >= 1; --n) {
        const float target = n == 1 ? kUnknown : std::exp(-static_cast<float>(n - 2));
        const std::uint16_t* chosen = history[index + static_cast<std::size_t>(n)].chosen(layer);
        for (int k = 0; k < geometry_.top_k; ++k)
            if (chosen[k] != DecodeStep::kNone) targets[chosen[k]] = target;
    }
}

}  // namespace fmoe
