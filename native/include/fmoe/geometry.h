// fmoe/geometry.h: the numbers that name an expert. Inside the core an expert E(l, j) is the single
// index e = l * J + j, the same number that assigns it to a rank.
#pragma once

#include "fmoe/check.h"

namespace fmoe {

struct Geometry {
    int num_layers = 0;   // L, MoE layers only
    int num_experts = 0;  // J, per layer
    int top_k = 0;        // K, activated per token and layer

    int size() const noexcept { return num_layers * num_experts; }
    int index(int layer, int expert) const noexcept { return layer * num_experts + expert; }
    int layer_of(int index) const noexcept { return index / num_experts; }
    int expert_of(int index) const noexcept { return index % num_experts; }

    void validate() const {
        require(num_layers > 0 && num_experts > 0, "geometry: layers and experts must be positive");
        require(top_k > 0 && top_k <= num_experts,
                "geometry: top_k must lie between 1 and num_experts");
    }
};

}  // namespace fmoe
