#include "fmoe/predictors/speculative_predictor.h"

#include <algorithm>
#include <utility>

namespace fmoe {

void SpeculativePredictor::gate_observed(const GateObservation& gate,
                                         std::vector<Prediction>& out) {
    const int target = gate.layer + 1;
    if (gate.speculative == nullptr || target >= geometry_.num_layers) return;
    Prediction prediction =
        Prediction::blank(iteration_, gate.layer, target, 1, gate.num_rows, geometry_.num_experts);
    std::copy_n(gate.speculative, prediction.p.size(), prediction.p.begin());
    std::fill(prediction.score.begin(), prediction.score.end(), 1.0F);
    out.push_back(std::move(prediction));
}

}  // namespace fmoe
