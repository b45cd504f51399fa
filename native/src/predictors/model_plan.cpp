#include "fmoe/predictors/model_plan.h"

#include <algorithm>

#include "fmoe/predictors/decode_step.h"

namespace fmoe {
namespace {

constexpr Windows kWindows[] = {
    {},
    {6, 1, 6, 6, 4, 2, 32},
    {4, 0, 4, 4, 4, 1, 32},
    {3, 0, 2, 4, 4, 0, 32},
    {2, 0, 1, 3, 2, 0, 32},
    {1, 0, 0, 2, 1, 0, 16},
};

void add_gates(ModelPlan& plan, const Geometry& geometry, int age, int first, int last) {
    for (int layer = std::max(first, 0); layer <= std::min(last, geometry.num_layers - 1); ++layer)
        plan.gates.push_back({age, layer});
}

}  // namespace

ModelPlan gate_plan(const Geometry& geometry, const Windows& windows, int layer) {
    ModelPlan plan;
    add_gates(plan, geometry, 0, layer - windows.seen + 1, layer);
    add_gates(plan, geometry, 1, layer - windows.before, layer + windows.after);
    const int last = std::min(layer + windows.ahead, geometry.num_layers - 1);
    for (int target = layer + 1; target <= last; ++target)
        plan.blocks.push_back({Question::this_iteration, target});
    plan.blocks.push_back({Question::next_iteration, layer});
    if (layer >= 2) plan.blocks.push_back({Question::next_iteration, layer - 2});
    if (layer == geometry.num_layers - 1 && layer >= 1)
        plan.blocks.push_back({Question::next_iteration, layer - 1});
    plan.blocks.push_back({Question::later, layer});
    plan.speculated_layer = layer + 1;
    return plan;
}

ModelPlan start_plan(const Geometry& geometry, const Windows& windows, int first_layer) {
    ModelPlan plan;
    const int last = std::min(first_layer + windows.start_group, geometry.num_layers) - 1;
    add_gates(plan, geometry, 1, first_layer - windows.start_around, last + windows.start_around);
    add_gates(plan, geometry, 2, first_layer, last);
    const int around = windows.start_around / 2;
    for (int layer = std::max(first_layer - around, 0);
         layer <= std::min(last + around, geometry.num_layers - 1); ++layer)
        plan.dense_layers.push_back(layer);
    for (int layer = first_layer; layer <= last; ++layer)
        plan.blocks.push_back({Question::this_iteration, layer});
    return plan;
}

ModelShape shape_of(const ModelPlan& plan, const Geometry& geometry, const Windows& windows) {
    const int experts = geometry.num_experts;
    return {static_cast<int>(plan.gates.size()) * experts,
            static_cast<int>(plan.dense_layers.size()) * experts,
            kNumFeatures,
            static_cast<int>(plan.blocks.size()),
            experts,
            windows.num_hidden};
}

std::size_t Windows::bytes(const Geometry& geometry) const {
    std::size_t sum = 0;
    for (int layer = 0; layer < geometry.num_layers; ++layer)
        sum += shape_of(gate_plan(geometry, *this, layer), geometry, *this).bytes();
    for (int first = 0; first < geometry.num_layers; first += start_group)
        sum += shape_of(start_plan(geometry, *this, first), geometry, *this).bytes();
    return sum;
}

Windows Windows::within(const Geometry& geometry, std::size_t bytes) {
    for (const Windows& windows : kWindows)
        if (windows.bytes(geometry) <= bytes) return windows;
    return *(std::end(kWindows) - 1);
}

}  // namespace fmoe
