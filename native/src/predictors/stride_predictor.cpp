#include "fmoe/predictors/stride_predictor.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace fmoe {
namespace {

constexpr float kLearningRate = 0.3F;
constexpr float kSmallestSquare = 1e-6F;

}  // namespace

StridePredictor::StridePredictor(const Geometry& geometry, int stride)
    : geometry_(geometry),
      stride_(stride),
      num_inputs_(geometry.num_experts + 1),
      record_(geometry),
      input_(static_cast<std::size_t>(num_inputs_), 1.0F),
      output_(static_cast<std::size_t>(geometry.num_experts), 0.0F),
      weights_(static_cast<std::size_t>(geometry.size()) * num_inputs_, 0.0F),
      squares_(weights_.size(), kSmallestSquare),
      is_taught_(static_cast<std::size_t>(geometry.num_layers), 0) {
    require(stride >= 1, "promoe: the stride must be at least 1");
}

void StridePredictor::gate_observed(const GateObservation& gate, std::vector<Prediction>& out) {
    record_.observe(gate);
    if (gate.layer >= stride_) {
        for (int row = 0; row < record_.num_rows(); ++row) {
            if (!record_.is_sound(row)) continue;
            read_input(row, gate.layer - stride_);
            learn(gate.layer, record_.chosen(row) + geometry_.index(gate.layer, 0));
        }
    }
    const int target = gate.layer + stride_;
    if (target >= geometry_.num_layers || !is_taught_[static_cast<std::size_t>(target)]) return;
    Prediction prediction = Prediction::blank(record_.iteration(), gate.layer, target, 1,
                                              record_.num_rows(), geometry_.num_experts);
    for (int row = 0; row < record_.num_rows(); ++row) {
        if (!record_.is_sound(row)) continue;
        read_input(row, gate.layer);
        predict(target, prediction.probs(row, target, geometry_.num_experts));
        prediction.score_of(row, target) = 1;
    }
    out.push_back(std::move(prediction));
}

void StridePredictor::read_input(int row, int layer) {
    const float* probs = record_.probs(row) + geometry_.index(layer, 0);
    std::transform(probs, probs + geometry_.num_experts, input_.begin(),
                   [](float p) { return std::sqrt(p); });
}

void StridePredictor::predict(int target, float* p) const {
    for (int j = 0; j < geometry_.num_experts; ++j) {
        const float* weights = weights_.data() + weights_of(target, j);
        float sum = 0;
        for (int i = 0; i < num_inputs_; ++i)
            sum += weights[i] * input_[static_cast<std::size_t>(i)];
        p[j] = 1.0F / (1.0F + std::exp(-sum));
    }
}

void StridePredictor::learn(int target, const std::uint8_t* chosen) {
    predict(target, output_.data());
    for (int j = 0; j < geometry_.num_experts; ++j) {
        const float error = output_[static_cast<std::size_t>(j)] - (chosen[j] != 0 ? 1.0F : 0.0F);
        float* weights = weights_.data() + weights_of(target, j);
        float* squares = squares_.data() + weights_of(target, j);
        for (int i = 0; i < num_inputs_; ++i) {
            const float gradient = error * input_[static_cast<std::size_t>(i)];
            squares[i] += gradient * gradient;
            weights[i] -= kLearningRate * gradient / std::sqrt(squares[i]);
        }
    }
    is_taught_[static_cast<std::size_t>(target)] = 1;
}

std::size_t StridePredictor::weights_of(int target, int expert) const noexcept {
    return static_cast<std::size_t>(geometry_.index(target, expert)) * num_inputs_;
}

}  // namespace fmoe
