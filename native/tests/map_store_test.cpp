#include "fmoe/map_store.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "fmoe/half.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{3, 7, 2};
constexpr int kEmbedding = 5;

struct Row {
    std::vector<float> probs;
    std::vector<float> embedding;
    std::vector<std::uint8_t> chosen;

    NewMap map() const {
        NewMap map;
        map.probs = probs.data();
        map.embedding = embedding.data();
        map.chosen = chosen.data();
        return map;
    }
};

Row random_row(std::mt19937& random) {
    std::uniform_real_distribution<float> uniform(0, 1);
    std::normal_distribution<float> normal;
    Row row;
    for (int e = 0; e < kGeometry.size(); ++e) {
        row.probs.push_back(uniform(random) < 0.3F ? 0 : uniform(random));
        row.chosen.push_back(uniform(random) < 0.3F);
    }
    for (int i = 0; i < kEmbedding; ++i) row.embedding.push_back(normal(random));
    return row;
}

void every_half_survives_a_round_trip() {
    for (int bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<Half>(bits);
        const float value = to_float(half);
        if (std::isnan(value))
            CHECK(std::isnan(to_float(to_half(value))));
        else
            CHECK(to_half(value) == half);
    }
}

void rounding_to_half_takes_the_nearest() {
    std::mt19937 random(0);
    std::uniform_real_distribution<float> exponent(-26, 15);
    for (int i = 0; i < 20000; ++i) {
        const float value = std::exp2(exponent(random));
        const Half half = to_half(value);
        const float error = std::fabs(to_float(half) - value);
        CHECK(error <= std::fabs(to_float(half + 1) - value));
        if (half > 0) CHECK(error <= std::fabs(to_float(half - 1) - value));
    }
    CHECK(to_half(1e30F) == to_half(kMaxHalf));
    CHECK(to_half(-1.0F) == 0xbc00);
}

// Scores handed over by the matcher lead to the same entries as scores computed by the store.
void known_scores_choose_as_computed_ones_do() {
    std::mt19937 random(1);
    MapStore computed({kGeometry, kEmbedding, 1}, 9);
    MapStore known({kGeometry, kEmbedding, 1}, 9);
    for (int round = 0; round < 30; ++round) {
        std::vector<Row> rows;
        const std::size_t num_rows = round % 10 == 9 ? 70 : 4;  // 70: in two parts
        for (std::size_t i = 0; i < num_rows; ++i) rows.push_back(random_row(random));
        if (round % 3 == 0) rows[3] = rows[0];  // must replace its twin of the same batch
        std::vector<std::vector<float>> semantic(num_rows, std::vector<float>(9));
        std::vector<std::vector<float>> whole(num_rows, std::vector<float>(9));
        std::vector<NewMap> plain;
        std::vector<NewMap> scored;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            plain.push_back(rows[i].map());
            scored.push_back(rows[i].map());
            known.semantic_scores(rows[i].embedding.data(), 1, semantic[i].data());
            known.map_scores(rows[i].probs.data(), whole[i].data());
            scored.back().semantic_scores = semantic[i].data();
            scored.back().map_scores = whole[i].data();
        }
        const auto expected = computed.insert(plain);
        CHECK(known.insert(scored) == expected);
        if (round > 3 && round % 3 == 0 && num_rows == 4)
            CHECK(expected[3].index == expected[0].index);
        known.check_integrity();
    }
}

void a_replaced_entry_voids_its_links() {
    std::mt19937 random(2);
    MapStore store({kGeometry, 0, 0}, 2);
    std::vector<Row> rows{random_row(random), random_row(random)};
    NewMap first = rows[0].map();
    const EntryRef a = store.insert({&first, 1})[0];
    NewMap second = rows[1].map();
    second.predecessor = a;
    const EntryRef b = store.insert({&second, 1})[0];
    CHECK(store.successor(a.index) == b);
    CHECK(store.predecessor(b.index) == a);

    const EntryRef again = store.insert({&first, 1})[0];  // replaces itself
    CHECK(again.index == a.index && again.generation != a.generation);
    CHECK(!store.is_current(a));
    CHECK(!store.predecessor(b.index));
    store.link(a, b);  // stale: nothing happens
    CHECK(!store.predecessor(b.index));
    store.link(again, b);
    CHECK(store.predecessor(b.index) == again);
    store.check_integrity();
}

void an_improper_map_changes_nothing() {
    std::mt19937 random(3);
    MapStore store({kGeometry, kEmbedding, 3}, 4);
    Row row = random_row(random);
    row.probs[8] = std::numeric_limits<float>::quiet_NaN();
    const NewMap map = row.map();
    CHECK_THROWS(std::invalid_argument, store.insert({&map, 1}));
    CHECK(store.size() == 0 && store.version() == 0);
}

void chosen_experts_are_kept_bit_by_bit() {
    std::mt19937 random(4);
    MapStore store({Geometry{5, 33, 1}, 0, 3}, 3);
    std::vector<float> probs(165, 0.5F);
    std::vector<std::uint8_t> chosen(165);
    for (auto& bit : chosen) bit = random() % 2;
    NewMap map;
    map.probs = probs.data();
    map.chosen = chosen.data();
    for (int i = 0; i < 3; ++i) store.insert({&map, 1});
    for (int e = 0; e < 165; ++e) CHECK(store.is_chosen(2, e / 33, e % 33) == (chosen[e] != 0));
}

}  // namespace

int main() {
    every_half_survives_a_round_trip();
    rounding_to_half_takes_the_nearest();
    known_scores_choose_as_computed_ones_do();
    a_replaced_entry_voids_its_links();
    an_improper_map_changes_nothing();
    chosen_experts_are_kept_bit_by_bit();
}
