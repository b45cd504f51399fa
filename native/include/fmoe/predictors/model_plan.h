// fmoe/predictors/model_plan.h: which gates an online model reads and which questions it answers.
//
// A gate model runs when gate l was seen. It reads gates l - (seen - 1) .. l of this iteration and
// l - before .. l + after of the one before, and answers
//     layers l + 1 .. l + ahead of this iteration,
//     layer l of the next iteration and, better informed, l - 2 (at the last gate l - 1 and l - 2),
//     later use of layer l: given that the next iteration does without, E[exp(-(n - 2))] with n
//     the iterations until the first use, 0 beyond n = kHorizon.
// A start model runs when the token is known, before layer 0, for a few neighbouring layers.
#pragma once

#include <cstddef>
#include <vector>

#include "fmoe/geometry.h"
#include "fmoe/predictors/online_model.h"

namespace fmoe {

inline constexpr int kHorizon = 7;

// A gate that is read: of `age` iterations ago.
struct GateInput {
    int age = 0;
    int layer = 0;
};

enum class Question : std::uint8_t { this_iteration, next_iteration, later };

struct Block {
    Question question;
    int layer = 0;
};

struct ModelPlan {
    std::vector<GateInput> gates;
    std::vector<int> dense_layers;  // whose kByTokenAndMap feeds the hidden layer
    std::vector<Block> blocks;
    int speculated_layer = -1;  // of this_iteration, where a speculative gate is read
};

// How far models look. All of it shrinks where J is large, because weights grow with L J^2.
struct Windows {
    int seen = 8;
    int before = 2;
    int after = 9;
    int ahead = 6;
    int start_group = 4;  // layers of one start model
    int start_around = 4;
    int num_hidden = 32;

    // The widest of a fixed list whose models stay within `bytes`; the narrowest if none does.
    static Windows within(const Geometry& geometry, std::size_t bytes);
    // Of all models.
    std::size_t bytes(const Geometry& geometry) const;
};

ModelPlan gate_plan(const Geometry& geometry, const Windows& windows, int layer);
// Layers first_layer .. first_layer + start_group - 1.
ModelPlan start_plan(const Geometry& geometry, const Windows& windows, int first_layer);
ModelShape shape_of(const ModelPlan& plan, const Geometry& geometry, const Windows& windows);

}  // namespace fmoe
