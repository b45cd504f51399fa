#include "fmoe/predictors/online_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../model_kernels.h"
#include "fmoe/check.h"

namespace fmoe {
namespace {

constexpr float kRowRate = 0.05F;
constexpr float kHiddenRate = 0.02F;
constexpr float kFeatureRate = 0.025F;
constexpr float kFirstSquare = 0.1F;  // bounds the first steps
constexpr float kFirstFeatureSquare = 1.0F;
constexpr float kLeak = 0.01F;
constexpr float kRowSpread = 0.15F;  // weights begin evenly within +- of these
constexpr float kDenseSpread = 0.045F;
constexpr float kHiddenSpread = 0.01F;

// Small, and the same on every platform.
class Random {
public:
    explicit Random(std::uint32_t seed) : state_(seed) {}
    float within(float spread) {
        state_ = state_ * 1664525U + 1013904223U;
        return (static_cast<float>(state_ >> 8) / 8388608.0F - 1.0F) * spread;
    }

private:
    std::uint32_t state_;
};

std::vector<Segment> segments_of(const ModelShape& shape) {
    std::vector<Segment> segments;
    for (int b = 0; b < shape.num_blocks; ++b)
        segments.push_back({b * shape.block_stride(), shape.block_stride()});
    segments.push_back({shape.num_blocks * shape.block_stride(), shape.num_hidden});
    return segments;
}

std::size_t product(int a, int b) { return static_cast<std::size_t>(a) * b; }

}  // namespace

int ModelShape::block_stride() const noexcept { return to_lanes(num_outputs); }

int ModelShape::width() const noexcept { return num_blocks * block_stride() + num_hidden; }

std::size_t ModelShape::bytes() const noexcept {
    const std::size_t floats =
        product(num_rows + 1, width() + to_lanes(num_blocks + 1)) +
        product(num_hidden, num_blocks * block_stride() + to_lanes(num_blocks)) +
        product(num_dense, num_hidden + kLanes) +
        2 * product(num_blocks * num_features, block_stride());
    return floats * sizeof(float);
}

void ModelInput::clear() {
    rows.clear();
    values.clear();
    dense.clear();
    features.clear();
}

void ModelInput::add_row(int row, float value) {
    rows.push_back(row);
    values.push_back(value);
}

OnlineModel::OnlineModel(const ModelShape& shape, float prior,
                         const std::vector<float>& feature_weights, std::uint32_t seed)
    : shape_(shape),
      rows_(product(shape.num_rows + 1, shape.width()), 0.0F),
      row_squares_(product(shape.num_rows + 1, to_lanes(shape.num_blocks + 1)), kFirstSquare),
      hidden_rows_(product(shape.num_hidden, shape.num_blocks * shape.block_stride()), 0.0F),
      hidden_squares_(product(shape.num_hidden, to_lanes(shape.num_blocks)), kFirstSquare),
      dense_rows_(product(shape.num_dense, shape.num_hidden), 0.0F),
      dense_squares_(product(shape.num_dense, kLanes), kFirstSquare),
      feature_rows_(product(shape.num_blocks * shape.num_features, shape.block_stride()), 0.0F),
      feature_squares_(feature_rows_.size(), kFirstFeatureSquare),
      segments_(segments_of(shape)),
      ascending_(static_cast<std::size_t>(std::max(shape.num_hidden, shape.num_dense))),
      rates_(static_cast<std::size_t>(to_lanes(shape.num_blocks + 1)), kRowRate),
      hidden_rates_(static_cast<std::size_t>(to_lanes(shape.num_blocks)), kHiddenRate),
      output_(static_cast<std::size_t>(shape.width()), 0.0F),
      hidden_(static_cast<std::size_t>(shape.num_hidden), 0.0F),
      error_(output_.size(), 0.0F),
      mean_squares_(rates_.size(), 0.0F) {
    require(shape.num_hidden % kLanes == 0, "online model: num_hidden must be a multiple of 8");
    require(shape.num_blocks + 1 <= kMostSegments, "online model: too many blocks");
    require(prior > 0 && prior < 1, "online model: the prior must lie between 0 and 1");
    const int outputs = shape.num_blocks * shape.block_stride();
    Random random(seed);
    for (int r = 0; r < shape.num_rows; ++r)
        for (int h = 0; h < shape.num_hidden; ++h)
            rows_[product(r, shape.width()) + outputs + h] = random.within(kRowSpread);
    for (float& weight : hidden_rows_) weight = random.within(kHiddenSpread);
    for (float& weight : dense_rows_) weight = random.within(kDenseSpread);
    std::fill_n(rows_.begin() + static_cast<std::ptrdiff_t>(product(shape.num_rows, shape.width())),
                outputs, std::log(prior / (1 - prior)));
    for (std::size_t i = 0; i < feature_rows_.size(); ++i)
        feature_rows_[i] = feature_weights[i / shape.block_stride()];
    rates_[shape.num_blocks] = kHiddenRate;
    std::iota(ascending_.begin(), ascending_.end(), 0);
}

const float* OnlineModel::predict(const ModelInput& input) {
    forward(input);
    return output_.data();
}

void OnlineModel::forward(const ModelInput& input) {
    const ModelKernels& kernels = model_kernels();
    const int width = shape_.width();
    const int outputs = shape_.num_blocks * shape_.block_stride();
    input_rows_ = input.rows;
    input_values_ = input.values;
    input_rows_.push_back(shape_.num_rows);
    input_values_.push_back(1.0F);
    std::fill(output_.begin(), output_.end(), 0.0F);
    kernels.add_rows(output_.data(), rows_.data(), input_rows_.data(), input_values_.data(),
                     static_cast<int>(input_rows_.size()), width);

    if (shape_.num_dense > 0)
        kernels.add_rows(output_.data() + outputs, dense_rows_.data(), ascending_.data(),
                         input.dense.data(), shape_.num_dense, shape_.num_hidden);
    for (int h = 0; h < shape_.num_hidden; ++h) {
        const float sum = output_[outputs + h];
        hidden_[h] = sum > 0 ? sum : kLeak * sum;
    }
    kernels.add_rows(output_.data(), hidden_rows_.data(), ascending_.data(), hidden_.data(),
                     shape_.num_hidden, outputs);
    for (std::size_t i = 0; i < input.features.size(); ++i) {
        if (input.features[i] == nullptr) continue;
        kernels.add_product(output_.data() + (i / shape_.num_features) * shape_.block_stride(),
                            input.features[i], feature_rows_.data() + i * shape_.block_stride(),
                            shape_.block_stride());
    }
    kernels.sigmoid(output_.data(), outputs);
}

void OnlineModel::learn(const ModelInput& input, const float* targets) {
    const ModelKernels& kernels = model_kernels();
    forward(input);
    find_errors(targets);
    find_hidden_errors();
    measure_segments();
    const int outputs = shape_.num_blocks * shape_.block_stride();
    kernels.descend_rows(hidden_rows_.data(), hidden_squares_.data(), ascending_.data(),
                         hidden_.data(), shape_.num_hidden, outputs, error_.data(),
                         segments_.data(), shape_.num_blocks, mean_squares_.data(),
                         hidden_rates_.data());
    kernels.descend_rows(rows_.data(), row_squares_.data(), input_rows_.data(),
                         input_values_.data(), static_cast<int>(input_rows_.size()), shape_.width(),
                         error_.data(), segments_.data(), shape_.num_blocks + 1,
                         mean_squares_.data(), rates_.data());
    if (shape_.num_dense > 0) {
        const Segment whole{0, shape_.num_hidden};
        float mean_square[kLanes] = {mean_squares_[shape_.num_blocks]};
        float rate[kLanes] = {kHiddenRate};
        kernels.descend_rows(dense_rows_.data(), dense_squares_.data(), ascending_.data(),
                             input.dense.data(), shape_.num_dense, shape_.num_hidden,
                             error_.data() + outputs, &whole, 1, mean_square, rate);
    }
    for (std::size_t i = 0; i < input.features.size(); ++i) {
        if (input.features[i] == nullptr) continue;
        const std::size_t at = i * shape_.block_stride();
        kernels.descend_each(feature_rows_.data() + at, feature_squares_.data() + at,
                             error_.data() + (i / shape_.num_features) * shape_.block_stride(),
                             input.features[i], kFeatureRate, shape_.block_stride());
    }
}

// dLoss/dz = p - target; nothing where it is not known, and for the padding.
void OnlineModel::find_errors(const float* targets) {
    const int stride = shape_.block_stride();
    for (int b = 0; b < shape_.num_blocks; ++b) {
        const int begin = b * stride;
        for (int i = begin; i < begin + shape_.num_outputs; ++i)
            error_[i] = targets[i] < 0 ? 0.0F : output_[i] - targets[i];
    }
}

void OnlineModel::find_hidden_errors() {
    const int outputs = shape_.num_blocks * shape_.block_stride();
    for (int h = 0; h < shape_.num_hidden; ++h) {
        const float slope =
            model_kernels().dot(hidden_rows_.data() + product(h, outputs), error_.data(), outputs);
        error_[outputs + h] = hidden_[h] > 0 ? slope : kLeak * slope;
    }
}

void OnlineModel::measure_segments() {
    for (int s = 0; s <= shape_.num_blocks; ++s) {
        const float* error = error_.data() + segments_[s].begin;
        const int size = s < shape_.num_blocks ? shape_.num_outputs : shape_.num_hidden;
        mean_squares_[s] = size == 0 ? 0.0F
                                     : model_kernels().dot(error, error, segments_[s].size) /
                                           static_cast<float>(size);
    }
}

}  // namespace fmoe
