// fmoe/predictors/online_model.h: a wide and deep logistic model that learns one sample at a time.
//
//     hidden = leaky(c + sum_r value_r E_r + dense X)
//     z[b]   = bias[b] + sum_r value_r W_r[b] + sum_f feature_f[b] * D_f[b] + hidden V[b]
//     p      = 1 / (1 + exp(-z))
//
// over B blocks of J outputs, each of its own question. Loss: binary cross-entropy. Descent:
// Adagrad, with one accumulator a row and block (of its mean square gradient) for W, E, V and X.
// Against one a weight, that costs 0.0005 of recall on GPT-OSS routing, halves the memory and
// leaves one root a block instead of one a weight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fmoe {

// Part of a row of weights that shares a learning rate: `size` weights from `begin` on.
struct Segment {
    int begin = 0;
    int size = 0;
};

struct ModelShape {
    int num_rows = 0;      // R: sparse inputs, of which a sample gives a few
    int num_dense = 0;     // inputs of the hidden layer that every sample gives
    int num_features = 0;  // F: inputs that speak of one output each
    int num_blocks = 0;    // B
    int num_outputs = 0;   // J, of a block
    int num_hidden = 0;    // H

    int block_stride() const noexcept;  // J, padded
    int width() const noexcept;         // of a row of weights: B blocks, then H
    std::size_t bytes() const noexcept;
};

// One sample. Cleared and filled again, so that it allocates only at first.
struct ModelInput {
    std::vector<int> rows;               // each once
    std::vector<float> values;           // of the rows
    std::vector<float> dense;            // [num_dense]
    std::vector<const float*> features;  // [B * F], each [block_stride], or null: all 0

    void clear();
    void add_row(int row, float value);
};

// Not thread-safe: it keeps the activations of the last sample.
class OnlineModel {
public:
    // Weights are drawn from `seed`: the same samples make the same model.
    // feature_weights [B * F]: where the features' weights begin.
    OnlineModel(const ModelShape& shape, float prior, const std::vector<float>& feature_weights,
                std::uint32_t seed);

    const ModelShape& shape() const noexcept { return shape_; }
    // p of each block [B, block_stride]; valid until the next call.
    const float* predict(const ModelInput& input);
    // One step towards `targets` [B, block_stride], in [0, 1]; a negative target is not known.
    void learn(const ModelInput& input, const float* targets);

private:
    void forward(const ModelInput& input);
    void find_errors(const float* targets);
    void find_hidden_errors();
    void measure_segments();

    ModelShape shape_;
    std::vector<float> rows_;  // [R + 1, width]: W and E side by side; the last row is the bias
    std::vector<float> row_squares_;
    std::vector<float> hidden_rows_;  // V [H, B * block_stride]
    std::vector<float> hidden_squares_;
    std::vector<float> dense_rows_;  // X [num_dense, H]
    std::vector<float> dense_squares_;
    std::vector<float> feature_rows_;  // D [B, F, block_stride]
    std::vector<float> feature_squares_;

    std::vector<Segment> segments_;    // the blocks, then the hidden layer
    std::vector<int> ascending_;       // 0, 1, ..: all rows of V or X
    std::vector<float> rates_;         // by segment, of the sparse rows
    std::vector<float> hidden_rates_;  // by segment, of V

    // Of the last sample.
    std::vector<int> input_rows_;
    std::vector<float> input_values_;
    std::vector<float> output_;        // [width]: z, then p; behind it the hidden layer
    std::vector<float> hidden_;        // [H], after the leaky step
    std::vector<float> error_;         // [width]
    std::vector<float> mean_squares_;  // of the error, by segment
};

}  // namespace fmoe
