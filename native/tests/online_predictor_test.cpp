#include "fmoe/predictors/online_predictor.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

using namespace fmoe;

namespace {

using Predictions = std::vector<Prediction>;

// One iteration of any rows, and what the gates say in it.
struct Iteration {
    std::vector<std::uint64_t> requests;
    std::vector<Phase> phases;
    std::vector<std::int32_t> tokens;
    std::vector<float> probs;          // [L, R, J]
    std::vector<std::uint8_t> chosen;  // [L, R, J]
};

// Layer l chooses experts token + l + (0 .. K - 1) mod J, so that the token tells all.
Iteration iteration_of(const Geometry& geometry, std::vector<std::uint64_t> requests,
                       std::vector<std::int32_t> tokens) {
    Iteration made;
    const auto rows = requests.size();
    made.requests = std::move(requests);
    made.phases.assign(rows, Phase::decode);
    made.tokens = std::move(tokens);
    made.probs.assign(rows * geometry.size(), 0.0F);
    made.chosen.assign(rows * geometry.size(), 0);
    for (int layer = 0; layer < geometry.num_layers; ++layer)
        for (std::size_t row = 0; row < rows; ++row)
            for (int k = 0; k < geometry.top_k; ++k) {
                const int j = (made.tokens[row] + 1 + layer + k) % geometry.num_experts;
                const std::size_t at = (layer * rows + row) * geometry.num_experts + j;
                made.chosen[at] = 1;
                made.probs[at] = 1.0F / static_cast<float>(k + 1);
            }
    return made;
}

Predictions start(OnlinePredictor& predictor, const Iteration& iteration, std::uint64_t number) {
    Predictions out;
    predictor.iteration_started(
        {number, static_cast<int>(iteration.requests.size()), iteration.requests.data(),
         iteration.phases.data(), iteration.tokens.data(), nullptr, 0},
        out);
    return out;
}

void observe(OnlinePredictor& predictor, const Geometry& geometry, const Iteration& iteration,
             int layer, Predictions& out) {
    const int rows = static_cast<int>(iteration.requests.size());
    const std::size_t begin = static_cast<std::size_t>(layer) * rows * geometry.num_experts;
    predictor.gate_observed(
        {layer, rows, iteration.probs.data() + begin, iteration.chosen.data() + begin, nullptr},
        out);
}

Predictions play(OnlinePredictor& predictor, const Geometry& geometry, const Iteration& iteration,
                 std::uint64_t number) {
    Predictions out = start(predictor, iteration, number);
    for (int layer = 0; layer < geometry.num_layers; ++layer)
        observe(predictor, geometry, iteration, layer, out);
    predictor.iteration_ended(out);
    return out;
}

bool are_equal(const Predictions& a, const Predictions& b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i)
        if (a[i].p != b[i].p || a[i].later != b[i].later || a[i].first_layer != b[i].first_layer ||
            a[i].is_next_iteration != b[i].is_next_iteration || a[i].score != b[i].score)
            return false;
    return true;
}

const Geometry kGeometry{5, 12, 2};
const StoreShape kShape{kGeometry, 0, 3};

Iteration random_iteration(std::mt19937& random, std::uint64_t request) {
    return iteration_of(kGeometry, {request}, {static_cast<std::int32_t>(random() % 6)});
}

void teach(OnlinePredictor& predictor, int num_iterations, std::uint64_t request,
           std::uint32_t seed = 1) {
    std::mt19937 random(seed);
    for (int i = 0; i < num_iterations; ++i)
        play(predictor, kGeometry, random_iteration(random, request), i);
    predictor.request_ended(request);
}

// Part of what `layers` choose that their predictions at the start rank among the K first.
double start_recall(OnlinePredictor& predictor, int num_iterations) {
    std::mt19937 random(9);
    int found = 0;
    int all = 0;
    for (int i = 0; i < num_iterations; ++i) {
        const Iteration iteration = random_iteration(random, 77);
        const Predictions made = play(predictor, kGeometry, iteration, i);
        for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
            const float* p = made[0].probs(0, layer, kGeometry.num_experts);
            for (int j = 0; j < kGeometry.num_experts; ++j) {
                if (iteration.chosen[layer * kGeometry.num_experts + j] == 0) continue;
                int rank = 0;
                for (int other = 0; other < kGeometry.num_experts; ++other) rank += p[other] > p[j];
                found += rank < kGeometry.top_k;
                ++all;
            }
        }
    }
    predictor.request_ended(77);
    return static_cast<double>(found) / all;
}

void probabilities_lie_between_0_and_1_whatever_comes() {
    std::mt19937 random(5);
    for (const Geometry geometry :
         {Geometry{1, 2, 1}, Geometry{2, 5, 5}, Geometry{3, 9, 2}, Geometry{13, 16, 3}}) {
        OnlinePredictor predictor({geometry, 0, 3}, 20);
        for (std::uint64_t i = 0; i < 40; ++i) {
            Iteration iteration = iteration_of(geometry, {i / 9, 100 + i / 4}, {-1, 3});
            if (i % 4 == 0) {  // a prompt that chooses everything
                iteration.phases[1] = Phase::prefill;
                std::fill(iteration.chosen.begin(), iteration.chosen.end(), 1);
            }
            for (float& p : iteration.probs) {
                if (i % 5 == 1) p = 0;
                if (i % 5 == 2) p = std::numeric_limits<float>::quiet_NaN();
                if (i % 5 == 3) p = 1e30F * static_cast<float>(random() % 3);
            }
            for (const Prediction& made : play(predictor, geometry, iteration, i)) {
                CHECK(made.first_layer >= 0);
                CHECK(made.first_layer + made.num_layers <= geometry.num_layers);
                for (float p : made.p) CHECK(p >= 0 && p <= 1);
                for (float later : made.later) CHECK(later >= 0 && later <= 1);
                CHECK(made.later.empty() || made.later.size() == made.p.size());
            }
        }
    }
}

void the_same_past_makes_the_same_predictions_whatever_follows() {
    OnlinePredictor one(kShape, 50);
    OnlinePredictor other(kShape, 50);
    std::mt19937 random(3);
    for (int i = 0; i < 30; ++i) {
        const Iteration iteration = random_iteration(random, 1);
        CHECK(are_equal(play(one, kGeometry, iteration, i), play(other, kGeometry, iteration, i)));
    }
    // Gates after layer 2 differ: nothing that was said before does.
    const Iteration a = iteration_of(kGeometry, {1}, {0});
    Iteration b = a;
    std::fill(b.chosen.begin() + 3 * kGeometry.num_experts, b.chosen.end(), 1);
    Predictions said_a = start(one, a, 30);
    Predictions said_b = start(other, b, 30);
    for (int layer = 0; layer < 3; ++layer) {
        observe(one, kGeometry, a, layer, said_a);
        observe(other, kGeometry, b, layer, said_b);
    }
    CHECK(are_equal(said_a, said_b));
}

void a_clone_goes_on_as_the_original_does() {
    OnlinePredictor original(kShape, 50);
    teach(original, 25, 1);
    const std::unique_ptr<Predictor> clone = original.clone();
    auto& copy = static_cast<OnlinePredictor&>(*clone);
    std::mt19937 random(4);
    Predictions last;
    for (int i = 0; i < 12; ++i) {
        const Iteration iteration = random_iteration(random, 2);
        last = play(original, kGeometry, iteration, i);
        CHECK(are_equal(last, play(copy, kGeometry, iteration, i)));
    }
    play(copy, kGeometry, random_iteration(random, 2), 12);
    const Iteration next = random_iteration(random, 3);
    CHECK(!are_equal(play(original, kGeometry, next, 13), play(copy, kGeometry, next, 13)));
}

void a_step_that_failed_teaches_nothing() {
    OnlinePredictor one(kShape, 50);
    OnlinePredictor other(kShape, 50);
    std::mt19937 random(6);
    for (int i = 0; i < 20; ++i) {
        const Iteration iteration = random_iteration(random, 1);
        if (i % 3 == 0) {
            Predictions ignored = start(one, iteration, 1000 + i);
            observe(one, kGeometry, iteration, 0, ignored);
        }
        CHECK(are_equal(play(one, kGeometry, iteration, i), play(other, kGeometry, iteration, i)));
    }
}

void a_prefill_changes_no_prediction_of_decoding() {
    OnlinePredictor one(kShape, 50);
    OnlinePredictor other(kShape, 50);
    std::mt19937 random(7);
    for (int i = 0; i < 20; ++i) {
        Iteration prompt = iteration_of(kGeometry, {500}, {-1});
        prompt.phases[0] = Phase::prefill;
        std::fill(prompt.chosen.begin(), prompt.chosen.end(), 1);
        play(one, kGeometry, prompt, 2 * i);
        const Iteration iteration = random_iteration(random, 1);
        CHECK(are_equal(play(one, kGeometry, iteration, 2 * i + 1),
                        play(other, kGeometry, iteration, 2 * i + 1)));
    }
    Iteration prompt = iteration_of(kGeometry, {501}, {-1});
    prompt.phases[0] = Phase::prefill;
    const Predictions made = start(one, prompt, 100);
    for (float p : made[0].p) CHECK(p > 0.9F);  // prompts use everything
}

void rows_of_a_batch_are_predicted_by_their_own_past() {
    OnlinePredictor alone(kShape, 50);
    OnlinePredictor batch(kShape, 50);
    teach(alone, 30, 1);
    teach(batch, 30, 1);
    const Predictions one = start(alone, iteration_of(kGeometry, {5}, {2}), 50);
    const Predictions two = start(batch, iteration_of(kGeometry, {6, 5}, {4, 2}), 50);
    const std::size_t size = one[0].p.size();
    for (std::size_t i = 0; i < size; ++i) CHECK(one[0].p[i] == two[0].p[size + i]);
}

void it_learns_what_tokens_choose() {
    OnlinePredictor predictor(kShape, 50);
    const double blank = start_recall(predictor, 10);
    teach(predictor, 200, 1);
    const double taught = start_recall(predictor, 40);
    CHECK(taught > 0.95 && taught > blank + 0.2);
}

void maps_put_into_its_store_are_learnt_before_the_next_iteration() {
    OnlinePredictor first(kShape, 120);
    teach(first, 100, 1);
    OnlinePredictor second(kShape, 120);
    const MapStore& from = *first.store();
    MapStore& to = *second.store();
    std::vector<float> probs(static_cast<std::size_t>(kGeometry.size()));
    std::vector<std::uint8_t> chosen(probs.size());
    EntryRef before;
    for (int entry = 0; entry < from.size(); ++entry) {
        for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
            from.read_probs(entry, layer, probs.data() + kGeometry.index(layer, 0));
            from.read_chosen(entry, layer, chosen.data() + kGeometry.index(layer, 0));
        }
        NewMap map;
        map.probs = probs.data();
        map.chosen = chosen.data();
        map.token_id = from.token_id(entry);
        map.predecessor = before;
        before = to.insert({&map, 1})[0];
    }
    OnlinePredictor blank(kShape, 120);
    CHECK(start_recall(second, 8) > start_recall(blank, 8) + 0.2);
}

void the_store_holds_the_newest_maps_in_a_chain() {
    OnlinePredictor predictor(kShape, 7);
    std::mt19937 random(8);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < 19; ++i) {
        const Iteration iteration = random_iteration(random, 1);
        tokens.push_back(iteration.tokens[0]);
        play(predictor, kGeometry, iteration, i);
    }
    MapStore& store = *predictor.store();
    store.check_integrity();
    CHECK(store.size() == 7);
    int entry = (19 - 1) % 7;
    for (int i = 0; i < 7; ++i) {
        CHECK(store.token_id(entry) == tokens[18 - i]);
        const EntryRef before = store.predecessor(entry);
        CHECK(static_cast<bool>(before) == (i < 6));
        entry = before.index;
    }
}

// Against a plain list of everything that was appended.
void the_log_keeps_the_newest_and_finds_them_by_token() {
    const Geometry geometry{2, 4, 1};
    const int capacity = 10;
    RoutingLog log(geometry, capacity);
    std::mt19937 random(1);
    std::vector<std::int32_t> tokens;
    for (std::uint64_t i = 0; i < 200; ++i) {
        const auto token = static_cast<std::int32_t>(random() % 30) - 1;
        const std::uint16_t chosen[2]{static_cast<std::uint16_t>(i % 4), 1};
        CHECK(log.append(token, chosen, i == 0 ? RoutingLog::kNowhere : i - 1) == i);
        tokens.push_back(token);
        CHECK(log.num_tokens() <= capacity);
        for (std::int32_t asked = 0; asked < 29; ++asked) {
            std::uint64_t use = log.last_use(asked);
            for (std::uint64_t age = 0; age < capacity && age <= i; ++age) {
                if (tokens[i - age] != asked) continue;
                CHECK(use == i - age && log.is_kept(use) && log.chosen(use)[0] == use % 4);
                use = log.use_before(use);
            }
            CHECK(!log.is_kept(use));
        }
    }
    CHECK(log.last_use(-1) == RoutingLog::kNowhere);
    CHECK(RoutingLog::capacity_within({48, 128, 8}, std::size_t{32} << 20, 65536) * 768 <=
          32 << 20);
}

}  // namespace

int main() {
    probabilities_lie_between_0_and_1_whatever_comes();
    the_same_past_makes_the_same_predictions_whatever_follows();
    a_clone_goes_on_as_the_original_does();
    a_step_that_failed_teaches_nothing();
    a_prefill_changes_no_prediction_of_decoding();
    rows_of_a_batch_are_predicted_by_their_own_past();
    it_learns_what_tokens_choose();
    maps_put_into_its_store_are_learnt_before_the_next_iteration();
    the_store_holds_the_newest_maps_in_a_chain();
    the_log_keeps_the_newest_and_finds_them_by_token();
}
