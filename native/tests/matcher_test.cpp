#include "fmoe/matcher.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "../src/packed_queries.h"
#include "../src/similarity_kernels.h"
#include "check.h"

using namespace fmoe;

namespace {

std::vector<float> random_map(std::mt19937& random, int size) {
    std::uniform_real_distribution<float> uniform(0, 1);
    std::vector<float> map;
    for (int i = 0; i < size; ++i) map.push_back(uniform(random) < 0.3F ? 0 : uniform(random));
    return map;
}

std::vector<Half> halves(std::mt19937& random, int size) {
    std::vector<Half> made;
    for (float value : random_map(random, size)) made.push_back(to_half(value));
    return made;
}

// The vector loops give what the portable ones give, at every length and with any columns left out.
void kernels_agree() {
    std::mt19937 random(0);
    const SimilarityKernels& plain = *runnable_similarity_kernels().front();
    for (const SimilarityKernels* fast : runnable_similarity_kernels()) {
        for (int blocks : {1, 2, 3, 5}) {
            const int count = blocks * kColumnBlock;
            const std::size_t stride = static_cast<std::size_t>(count) + kColumnBlock;
            const std::vector<Half> columns = halves(random, static_cast<int>(stride) * 6);
            const std::vector<int> which{0, 3, 4};
            const std::vector<float> weights{0.5F, 0.25F, 0.125F};
            std::vector<float> a(static_cast<std::size_t>(count), 1);
            std::vector<float> b = a;
            plain.accumulate(columns.data(), stride, which.data(), weights.data(), 3, count,
                             a.data());
            fast->accumulate(columns.data(), stride, which.data(), weights.data(), 3, count,
                             b.data());
            for (int c = 0; c < count; ++c) CHECK(std::fabs(a[c] - b[c]) < 1e-6F);
        }
        for (int num_terms : {1, 5, 8, 63, 64}) {
            const std::size_t stride = kColumnBlock + 8;
            const std::vector<Half> columns = halves(random, static_cast<int>(stride) * 64);
            std::vector<float> panel(static_cast<std::size_t>(num_terms) * kColumnBlock);
            std::vector<float> expected = panel;
            plain.unpack(columns.data(), columns.data(), stride, num_terms, expected.data());
            fast->unpack(columns.data(), columns.data(), stride, num_terms, panel.data());
            CHECK(panel == expected);
            for (int num_queries : {1, 2, 3, 7, 8, 13, 64}) {
                const std::vector<float> queries = random_map(random, num_terms * num_queries);
                std::vector<float> a(static_cast<std::size_t>(num_queries) * kColumnBlock, 1);
                std::vector<float> b = a;
                const auto row = static_cast<std::size_t>(num_queries);
                plain.multiply(queries.data(), row, num_queries, panel.data(), num_terms, a.data());
                fast->multiply(queries.data(), row, num_queries, panel.data(), num_terms, b.data());
                for (std::size_t i = 0; i < a.size(); ++i) CHECK(std::fabs(a[i] - b[i]) < 1e-5F);
            }
        }
    }
}

// Small terms after a large one are the worst: alone, each would be lost.
void long_sums_keep_the_law_of_rounding() {
    constexpr int kTerms = 6000;
    std::vector<Half> columns(static_cast<std::size_t>(kTerms) * kColumnBlock, Half{1});  // 2^-24
    std::fill_n(columns.begin(), kColumnBlock, to_half(1.0F));
    std::vector<float> weights(kTerms, 0.5F);
    weights[0] = 1;
    std::vector<int> which(kTerms);
    std::iota(which.begin(), which.end(), 0);
    const double exact = 1 + (kTerms - 1) * 0x1p-25;
    const double allowed = exact * (kLongestSum + num_partial_sums(kTerms) + 2) * 0x1p-24;
    for (const SimilarityKernels* kernels : runnable_similarity_kernels()) {
        std::vector<float> sums(kColumnBlock);
        kernels->accumulate(columns.data(), kColumnBlock, which.data(), weights.data(), kTerms,
                            kColumnBlock, sums.data());
        for (float sum : sums) CHECK(std::fabs(sum - exact) <= allowed);
    }
    PackedQueries queries(3, kTerms);
    for (int q = 0; q < 3; ++q) queries.set(q, weights.data());
    std::vector<float> sums(3 * kColumnBlock);
    queries.multiply(columns.data(), kColumnBlock, columns.data(), sums.data());
    for (float sum : sums) CHECK(std::fabs(sum * queries.length(0) - exact) <= allowed);
}

void best_takes_the_first_of_equals_and_no_nan() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::mt19937 random(1);
    for (const SimilarityKernels* kernels : runnable_similarity_kernels()) {
        for (int count = 1; count < 40; ++count) {
            std::vector<float> dots(static_cast<std::size_t>(count));
            const std::vector<float> scales(static_cast<std::size_t>(count), 0.5F);
            for (float& dot : dots) dot = static_cast<float>(random() % 4);
            int expected = 0;
            for (int c = 1; c < count; ++c)
                if (dots[c] > dots[expected]) expected = c;
            BestScore best = kernels->best(dots.data(), scales.data(), count);
            CHECK(best.index == expected && best.score == dots[expected] * 0.5F);
            dots[expected] = nan;
            best = kernels->best(dots.data(), scales.data(), count);
            CHECK(best.index != expected);
        }
        CHECK(kernels->best(nullptr, nullptr, 0).index == -1);
        CHECK(kernels->best(&nan, &nan, 1).index == -1);
    }
}

void the_incremental_cosine_equals_the_whole_one() {
    std::mt19937 random(2);
    const Geometry geometry{5, 9, 2};
    MapStore store({geometry, 0, 3}, 130);
    for (int i = 0; i < 130; ++i) {
        const auto map = random_map(random, geometry.size());
        NewMap entry;
        entry.probs = map.data();
        store.insert({&entry, 1});
    }
    Matcher matcher(store);
    for (int iteration = 0; iteration < 3; ++iteration) {
        const auto query = random_map(random, geometry.size());
        matcher.start(1, nullptr);
        for (int layer = 0; layer < geometry.num_layers; ++layer)
            matcher.observe(layer, query.data() + geometry.index(layer, 0));
        std::vector<float> whole(130);
        store.map_scores(query.data(), whole.data());
        const auto scores = matcher.trajectory_scores(0);
        for (int i = 0; i < 130; ++i) CHECK(std::fabs(scores[i] - whole[i]) < 1e-5F);
        const auto nearest = matcher.nearest_trajectory(0, 130);
        CHECK(nearest.size() == 130 && nearest[0] == matcher.nearest_trajectory(0, 1)[0]);
        for (std::size_t i = 1; i < nearest.size(); ++i)
            CHECK(nearest[i - 1].score >= nearest[i].score);
    }
}

void a_question_about_a_changed_store_is_refused() {
    const Geometry geometry{1, 2, 1};
    MapStore store({geometry, 0, 3}, 2);
    const std::vector<float> map{0.5F, 0.5F};
    NewMap entry;
    entry.probs = map.data();
    store.insert({&entry, 1});
    Matcher matcher(store);
    matcher.start(1, nullptr);
    matcher.observe(0, map.data());
    CHECK(matcher.best_trajectory(0).entry == 0);
    store.insert({&entry, 1});
    CHECK_THROWS(std::logic_error, matcher.best_trajectory(0));
}

}  // namespace

int main() {
    kernels_agree();
    long_sums_keep_the_law_of_rounding();
    best_takes_the_first_of_equals_and_no_nan();
    the_incremental_cosine_equals_the_whole_one();
    a_question_about_a_changed_store_is_refused();
}
