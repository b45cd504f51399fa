// fmoe/predictor.h: looks at what inference publishes and says which experts the next layers will
// ask for. Pure: no clock, no I/O, no thread; the engine calls it on its matcher thread, the
// simulator in line. It may be slow: nothing on the inference path waits for it unless
// is_synchronous().
//
// Shapes: R rows (requests of the iteration), L layers, J experts, h embedding size.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fmoe/geometry.h"

namespace fmoe {

enum class Phase : std::uint8_t { prefill, decode };

// What is known before the first layer of an iteration. Pointers live until the call returns.
struct IterationContext {
    std::uint64_t iteration = 0;
    int num_rows = 0;
    const std::uint64_t* requests = nullptr;  // [R]
    const Phase* phases = nullptr;            // [R]
    const std::int32_t* token_ids = nullptr;  // [R] input token, -1 where there is none or many
    const float* embeddings = nullptr;        // [R, h], or null
    int embedding_size = 0;                   // h
};

// One layer's gate, seen by every row.
struct GateObservation {
    int layer = 0;
    int num_rows = 0;
    const float* probs = nullptr;          // [R, J] gate distribution; mean over a prefill's tokens
    const std::uint8_t* chosen = nullptr;  // [R, J] 1 where a token of the row chose the expert
    const float* speculative =
        nullptr;  // [R, J] gate layer+1 on this layer's hidden state, or null
};

// p of experts in layers [first_layer, first_layer + num_layers), one block a row.
struct Prediction {
    std::uint64_t iteration = 0;     // the iteration it was made in
    int observed_layer = -1;         // the last gate it has seen; -1: made before layer 0
    bool is_next_iteration = false;  // speaks of the iteration after this one
    int first_layer = 0;
    int num_layers = 0;
    int num_rows = 0;
    std::vector<float> p;  // [R, num_layers, J]
    // [R, num_layers, J], or empty where it is not predicted: given that the iteration it speaks of
    // does without the expert, E[exp(1 - n)], n the iterations after that one until the first use.
    std::vector<float> later;
    std::vector<float> score;  // [R, num_layers] similarity that found it, 1 where there is none

    // Of this shape, with p and score 0: a row that is left so says nothing.
    static Prediction blank(std::uint64_t iteration, int observed_layer, int first_layer,
                            int num_layers, int num_rows, int num_experts) {
        Prediction prediction;
        prediction.iteration = iteration;
        prediction.observed_layer = observed_layer;
        prediction.first_layer = first_layer;
        prediction.num_layers = num_layers;
        prediction.num_rows = num_rows;
        const auto blocks = static_cast<std::size_t>(num_rows) * num_layers;
        prediction.p.assign(blocks * num_experts, 0);
        prediction.score.assign(blocks, 0);
        return prediction;
    }

    float* probs(int row, int layer, int num_experts) noexcept {
        return p.data() +
               (static_cast<std::size_t>(row) * num_layers + (layer - first_layer)) * num_experts;
    }
    const float* probs(int row, int layer, int num_experts) const noexcept {
        return const_cast<Prediction*>(this)->probs(row, layer, num_experts);
    }
    float& score_of(int row, int layer) noexcept {
        return score[static_cast<std::size_t>(row) * num_layers + (layer - first_layer)];
    }
    float score_of(int row, int layer) const noexcept {
        return score[static_cast<std::size_t>(row) * num_layers + (layer - first_layer)];
    }
};

class MapStore;

class Predictor {
public:
    virtual ~Predictor() = default;
    // Predictions are appended to `out`.
    virtual void iteration_started(const IterationContext&, std::vector<Prediction>& out) = 0;
    virtual void gate_observed(const GateObservation&, std::vector<Prediction>& out) = 0;
    // All gates of the iteration were seen: learn from it. Does not come for an iteration whose
    // step failed; then the next iteration_started() discards what was gathered.
    virtual void iteration_ended(std::vector<Prediction>& out) = 0;
    virtual void request_ended(std::uint64_t request) = 0;
    // True: inference waits for the prediction (the baselines that the paper calls synchronous).
    virtual bool is_synchronous() const { return false; }
    // The expert maps it learns from, to be saved, loaded and merged between iterations; null where
    // it keeps none.
    virtual MapStore* store() { return nullptr; }
    // True: it reads GateObservation::speculative, which is computed for it alone.
    virtual bool wants_speculative() const { return false; }

    // True: without the speculative gate it predicts nothing. A step that is captured as one CUDA
    // graph shows none.
    virtual bool needs_speculative() const { return wants_speculative(); }
    // A predictor that has learnt the same and goes its own way from here, so that what one was
    // taught can be tried in many settings; null unless can_clone().
    virtual std::unique_ptr<Predictor> clone() const { return nullptr; }
    virtual bool can_clone() const { return false; }
};

}  // namespace fmoe
