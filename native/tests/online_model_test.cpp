#include "fmoe/predictors/online_model.h"

#include <cmath>
#include <random>
#include <vector>

#include "../src/model_kernels.h"
#include "check.h"
#include "fmoe/predictors/model_plan.h"

using namespace fmoe;

namespace {

std::vector<float> random_floats(std::mt19937& random, std::size_t size, float low, float high) {
    std::uniform_real_distribution<float> draw(low, high);
    std::vector<float> values(size);
    for (float& value : values) value = draw(random);
    return values;
}

void check_close(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
    for (std::size_t i = 0; i < a.size(); ++i)
        CHECK(std::fabs(a[i] - b[i]) <= tolerance * (1 + std::fabs(b[i])));
}

void functions_agree_with_the_library() {
    for (const ModelKernels* kernels : {&model_kernels(), &plain_model_kernels()}) {
        for (float begin = -100; begin < 100; begin += 0.37F) {
            std::vector<float> z(8);
            std::vector<float> x(8);
            for (int i = 0; i < 8; ++i) z[i] = begin + 0.046F * static_cast<float>(i);
            for (int i = 0; i < 8; ++i) x[i] = std::exp(0.3F * z[i]);
            std::vector<float> p = z;
            kernels->sigmoid(p.data(), 8);
            std::vector<float> y = x;
            kernels->log(y.data(), 8);
            for (int i = 0; i < 8; ++i) {
                CHECK(std::fabs(p[i] - 1 / (1 + std::exp(-z[i]))) < 1e-6F);
                CHECK(std::fabs(y[i] - std::log(x[i])) < 2e-6F * (1 + std::fabs(y[i])));
            }
        }
    }
}

// Every loop against its formula, over widths with and without a tail of the large blocks.
void loops_agree_with_their_formulas() {
    std::mt19937 random(1);
    for (const ModelKernels* kernels : {&model_kernels(), &plain_model_kernels()}) {
        for (int n : {8, 24, 32, 104}) {
            const int num_rows = 5;
            std::vector<float> matrix = random_floats(random, std::size_t(num_rows) * n, -1, 1);
            std::vector<float> squares = random_floats(random, num_rows * 8, 0.1F, 2);
            const std::vector<float> error = random_floats(random, n, -1, 1);
            const std::vector<int> rows{3, 0, 4};
            const std::vector<float> values{0.5F, -1.0F, 2.0F};
            const Segment segments[]{{0, 8}, {8, n - 8}};
            const std::vector<float> means{0.3F, 0.7F, 0, 0, 0, 0, 0, 0};
            const std::vector<float> rates{0.1F, 0.02F, 0, 0, 0, 0, 0, 0};

            std::vector<float> sum(n, 0.25F);
            std::vector<float> expected = sum;
            for (int r = 0; r < 3; ++r)
                for (int i = 0; i < n; ++i) expected[i] += values[r] * matrix[rows[r] * n + i];
            kernels->add_rows(sum.data(), matrix.data(), rows.data(), values.data(), 3, n);
            check_close(sum, expected, 1e-5F);
            double dot = 0;
            for (int i = 0; i < n; ++i) dot += static_cast<double>(sum[i]) * error[i];
            CHECK(std::fabs(kernels->dot(sum.data(), error.data(), n) - dot) < 1e-4);

            std::vector<float> stepped = matrix;
            std::vector<float> stepped_squares = squares;
            for (int r = 0; r < 3; ++r) {
                for (int s = 0; s < 2; ++s) {
                    float& square = stepped_squares[rows[r] * 8 + s];
                    square += values[r] * values[r] * means[s];
                    for (int i = segments[s].begin; i < segments[s].begin + segments[s].size; ++i)
                        stepped[rows[r] * n + i] -=
                            rates[s] * values[r] * error[i] / std::sqrt(square);
                }
            }
            kernels->descend_rows(matrix.data(), squares.data(), rows.data(), values.data(), 3, n,
                                  error.data(), segments, n == 8 ? 1 : 2, means.data(),
                                  rates.data());
            check_close(matrix, stepped, 1e-5F);

            std::vector<float> weights(n, 0.5F);
            std::vector<float> own(n, 1.0F);
            kernels->descend_each(weights.data(), own.data(), error.data(), sum.data(), 0.1F, n);
            for (int i = 0; i < n; ++i) {
                const float gradient = error[i] * sum[i];
                CHECK(std::fabs(own[i] - (1 + gradient * gradient)) < 1e-4F * own[i]);
                CHECK(std::fabs(weights[i] - (0.5F - 0.1F * gradient / std::sqrt(own[i]))) < 1e-4F);
            }
        }
    }
}

const ModelShape kShape{12, 5, 2, 3, 11, 16};

struct Sample {
    ModelInput input;
    std::vector<float> features;
    std::vector<float> targets;
};

Sample random_sample(std::mt19937& random) {
    Sample sample;
    const std::size_t stride = static_cast<std::size_t>(kShape.block_stride());
    for (int row : {1, 4, 9})
        sample.input.add_row(row + static_cast<int>(random() % 3), 0.5F + 0.1F * (random() % 9));
    sample.input.dense = random_floats(random, 5, -1, 1);
    sample.features = random_floats(random, 6 * stride, -1, 1);
    sample.targets.assign(3 * stride, -1.0F);
    for (int b = 0; b < 2; ++b)  // the third block is not known
        for (int j = 0; j < 11; ++j) sample.targets[b * stride + j] = random() % 4 == 0 ? 1 : 0;
    return sample;
}

void point_features(Sample& sample) {
    sample.input.features.clear();
    for (int i = 0; i < 6; ++i)
        sample.input.features.push_back(
            i == 3 ? nullptr : sample.features.data() + i * kShape.block_stride());
}

double loss(OnlineModel& model, const Sample& sample) {
    const float* p = model.predict(sample.input);
    double sum = 0;
    for (std::size_t i = 0; i < sample.targets.size(); ++i) {
        if (sample.targets[i] < 0) continue;
        sum -= std::log(sample.targets[i] > 0.5F ? p[i] : 1 - p[i]);
    }
    return sum;
}

void learning_a_sample_lowers_its_loss_and_stays_finite() {
    std::mt19937 random(2);
    const std::vector<float> feature_weights(6, 0.2F);
    OnlineModel model(kShape, 0.2F, feature_weights, 7);
    for (int i = 0; i < 300; ++i) {
        Sample sample = random_sample(random);
        point_features(sample);
        const double before = loss(model, sample);
        model.learn(sample.input, sample.targets.data());
        CHECK(loss(model, sample) < before);
        const float* p = model.predict(sample.input);
        for (int b = 0; b < 3; ++b)
            for (int j = 0; j < 11; ++j) {
                const float value = p[b * kShape.block_stride() + j];
                CHECK(value >= 0 && value <= 1);
            }
    }
}

void what_is_not_known_teaches_nothing() {
    std::mt19937 random(3);
    const std::vector<float> feature_weights(6, 0.2F);
    OnlineModel model(kShape, 0.2F, feature_weights, 7);
    Sample sample = random_sample(random);
    point_features(sample);
    const std::size_t size = static_cast<std::size_t>(3 * kShape.block_stride());
    const float* p = model.predict(sample.input);
    const std::vector<float> before(p, p + size);
    const std::vector<float> unknown(size, -1.0F);
    for (int i = 0; i < 10; ++i) model.learn(sample.input, unknown.data());
    p = model.predict(sample.input);
    CHECK(before == std::vector<float>(p, p + size));
}

void an_empty_sample_is_predicted_by_the_prior() {
    const ModelShape shape{4, 0, 0, 2, 8, 8};
    OnlineModel model(shape, 0.25F, {}, 1);
    const float* p = model.predict(ModelInput{});
    for (int i = 0; i < 16; ++i) CHECK(std::fabs(p[i] - 0.25F) < 1e-5F);
}

void models_of_every_geometry_stay_within_their_bytes() {
    const std::size_t bytes = std::size_t{256} << 20;
    for (const Geometry geometry : {Geometry{12, 8, 2}, Geometry{24, 32, 4}, Geometry{24, 60, 4},
                                    Geometry{48, 128, 8}, Geometry{61, 256, 8}, Geometry{1, 2, 1}})
        CHECK(Windows::within(geometry, bytes).bytes(geometry) <= bytes);
    CHECK(Windows::within({24, 60, 4}, bytes).ahead == 6);  // not shrunk without need
}

}  // namespace

int main() {
    functions_agree_with_the_library();
    loops_agree_with_their_formulas();
    learning_a_sample_lowers_its_loss_and_stays_finite();
    what_is_not_known_teaches_nothing();
    an_empty_sample_is_predicted_by_the_prior();
    models_of_every_geometry_stay_within_their_bytes();
}
