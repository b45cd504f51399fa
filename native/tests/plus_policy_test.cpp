#include "fmoe/policies/plus_policy.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "fmoe/planner.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{4, 8, 2};

Prediction uniform(int observed, int layer, std::vector<float> p_of_row, bool is_next = false) {
    Prediction made = Prediction::blank(1, observed, layer, 1, static_cast<int>(p_of_row.size()),
                                        kGeometry.num_experts);
    made.is_next_iteration = is_next;
    for (std::size_t row = 0; row < p_of_row.size(); ++row) {
        made.score_of(static_cast<int>(row), layer) = 1;
        for (int j = 0; j < kGeometry.num_experts; ++j)
            made.probs(static_cast<int>(row), layer, kGeometry.num_experts)[j] = p_of_row[row];
    }
    return made;
}

void rows_of_a_batch_need_an_expert_if_any_of_them_does() {
    NextUseEstimate estimate(kGeometry);
    estimate.predicted(uniform(-1, 2, {0.5F, 0.5F}));
    CHECK(std::fabs(estimate.p(kGeometry.index(2, 3)) - 0.75F) < 1e-6F);
    Prediction half = uniform(-1, 2, {0.5F, 0.9F});
    half.score_of(1, 2) = 0;  // says nothing
    estimate.predicted(half);
    CHECK(std::fabs(estimate.p(kGeometry.index(2, 3)) - 0.5F) < 1e-6F);
}

void what_speaks_of_another_use_than_the_next_is_ignored() {
    NextUseEstimate estimate(kGeometry);
    estimate.enter_layer(1);
    const std::vector<int> none;
    estimate.layer_used(1, none, true);
    const float before = estimate.p(kGeometry.index(1, 0));
    estimate.predicted(uniform(-1, 1, {1.0F}));       // its use in this iteration is over
    estimate.predicted(uniform(1, 2, {1.0F}, true));  // its use in this iteration comes first
    CHECK(estimate.p(kGeometry.index(1, 0)) == before);
    CHECK(estimate.p(kGeometry.index(2, 0)) < 1);
    estimate.predicted(uniform(1, 1, {1.0F}, true));
    CHECK(estimate.p(kGeometry.index(1, 0)) == 1);
}

void a_sooner_use_and_a_likelier_one_are_worth_more() {
    NextUseEstimate estimate(kGeometry);
    for (int layer = 0; layer < 4; ++layer) estimate.predicted(uniform(-1, layer, {0.4F}));
    estimate.enter_layer(0);
    for (int layer = 2; layer < 4; ++layer)
        CHECK(estimate.values()[kGeometry.index(layer, 0)] <
              estimate.values()[kGeometry.index(layer - 1, 0)]);
    const float before = estimate.values()[kGeometry.index(3, 1)];
    estimate.predicted(uniform(0, 3, {0.6F}));
    CHECK(estimate.values()[kGeometry.index(3, 1)] > before);
    for (float value : estimate.values()) CHECK(value >= 0 && value <= 1);
}

std::vector<int> random_gate(std::mt19937& random, int layer) {
    const int first = static_cast<int>(random() % 7);
    return {kGeometry.index(layer, first),
            kGeometry.index(layer, first + 1 + static_cast<int>(random() % (7 - first)))};
}

void a_shadow_misses_what_its_policy_misses() {
    for (const char* name : {"lru", "ema"}) {
        PolicyParams params;
        params.geometry = kGeometry;
        params.num_slots = 9;
        Planner planner(kGeometry, 9, make_policy(name, params).policy);
        FloorShadow shadow(name, kGeometry, 9);
        std::mt19937 random(2);
        for (std::uint64_t i = 1; i < 200; ++i) {
            planner.iteration_started({i, 1, false, 1, 1});
            for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
                const std::vector<int> needed = random_gate(random, layer);
                const GateOutcome outcome = planner.gate_requested({layer, needed, 0});
                CHECK(shadow.gate(needed) == outcome.misses);
                for (const LinkCommand& command : planner.take_commands())
                    planner.copy_done(command.expert);
            }
            planner.iteration_ended();
            shadow.iteration_ended();
        }
    }
}

// Own cost, where the policy always stalls `excess` more than the floor while it is free.
void the_guard_bounds_what_is_lost() {
    for (double excess : {0.3, 1.0, 5.0}) {
        FloorGuard guard(kGeometry, 9);
        FloorShadow lru("lru", kGeometry, 9);
        FloorShadow ema("ema", kGeometry, 9);
        std::mt19937 random(3);
        double own = 0;
        double floors[2] = {0, 0};
        double dearest = 0;
        int num_on = 0;
        for (int i = 0; i < 4000; ++i) {
            double cost = 0;
            for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
                const std::vector<int> needed = random_gate(random, layer);
                const int misses[2] = {lru.gate(needed), ema.gate(needed)};
                const double stall = std::min(misses[0], misses[1]) + (guard.is_on() ? 0 : excess);
                floors[0] += 1 + misses[0];
                floors[1] += 1 + misses[1];
                cost += 1 + std::max(misses[0], misses[1]);
                own += 1 + stall;
                guard.gate(needed, 1.0, stall);
            }
            dearest = std::max(dearest, cost);
            lru.iteration_ended();
            ema.iteration_ended();
            guard.iteration_ended();
            num_on += guard.is_on();
            const double floor = std::min(floors[0], floors[1]);
            CHECK(own <= 1.004 * floor + (FloorGuard::kMostSaved + 1 + 4 * excess) * dearest);
        }
        CHECK(num_on > 1000 && num_on < 4000);  // and it tries again
    }
}

void the_guard_leaves_alone_what_wins() {
    FloorGuard guard(kGeometry, 9);
    std::mt19937 random(3);
    for (int i = 0; i < 500; ++i) {
        for (int layer = 0; layer < kGeometry.num_layers; ++layer)
            guard.gate(random_gate(random, layer), 1.0, 0.0);
        guard.iteration_ended();
        CHECK(!guard.is_on());
    }
}

void nothing_is_prefetched_that_costs_more_than_it_hides() {
    NextUseEstimate estimate(kGeometry);
    PrefetchEconomy economy(kGeometry);
    economy.set_impatience(0.5);
    ExpertCache cache(kGeometry, 4);
    for (int expert : {8, 9, 10, 11}) {
        cache.reserve(expert, Cause::on_demand);
        cache.complete(expert);
    }
    estimate.enter_layer(0);
    Prediction sure = uniform(0, 1, {0.0F});
    for (int j : {0, 1, 2}) sure.probs(0, 1, 8)[j] = 1;
    sure.probs(0, 1, 8)[7] = 0.9F;
    estimate.predicted(sure);
    PrefetchOffer offer;
    offer.layer = 0;
    offer.load_time = 0.5;
    offer.victim = kGeometry.index(1, 3);  // resident, not needed
    CHECK(economy.choose(offer, estimate, cache) == kGeometry.index(1, 7));
    offer.victim = kGeometry.index(1, 0);  // resident and surely needed, as soon
    CHECK(economy.choose(offer, estimate, cache) == -1);
}

}  // namespace

int main() {
    rows_of_a_batch_need_an_expert_if_any_of_them_does();
    what_speaks_of_another_use_than_the_next_is_ignored();
    a_sooner_use_and_a_likelier_one_are_worth_more();
    a_shadow_misses_what_its_policy_misses();
    the_guard_bounds_what_is_lost();
    the_guard_leaves_alone_what_wins();
    nothing_is_prefetched_that_costs_more_than_it_hides();
}
