#include "fmoe/planner.h"

#include <vector>

#include "check.h"
#include "scripted_policy.h"

using namespace fmoe;
using Kind = LinkCommand::Kind;

namespace {

const Geometry kGeometry{2, 4, 2};

GateOutcome ask(Planner& planner, int layer, std::vector<int> needed) {
    return planner.gate_requested({layer, needed, 0});
}

void check_order(const LinkCommand& command, Kind kind, int expert) {
    CHECK(command.kind == kind && command.expert == expert);
}

void misses_are_started_in_order_and_become_hits() {
    Planner planner(kGeometry, 4, std::make_unique<ScriptedPolicy>());
    planner.iteration_started({1, 1, false, 0, 0});
    const GateOutcome first = ask(planner, 0, {1, 2});
    CHECK(first.misses == 2 && first.hits == 0);
    const auto commands = planner.take_commands();
    CHECK(commands.size() == 2);
    check_order(commands[0], Kind::start, 1);
    check_order(commands[1], Kind::start, 2);
    CHECK(commands[0].cause == Cause::on_demand && commands[0].slot != commands[1].slot);
    planner.copy_done(1);
    planner.copy_done(2);
    CHECK(ask(planner, 0, {1, 2}).hits == 2);
    CHECK(planner.take_commands().empty());
}

void more_experts_than_slots_come_in_waves_as_they_are_released() {
    Planner planner(kGeometry, 2, std::make_unique<ScriptedPolicy>());
    ask(planner, 0, {0, 1, 2, 3});
    CHECK(planner.take_commands().size() == 2 && planner.num_waiting() == 2);
    planner.copy_done(0);
    planner.copy_done(1);
    CHECK(planner.take_commands().empty());  // both slots are pinned
    planner.release(0);
    const auto wave = planner.take_commands();
    CHECK(wave.size() == 1);
    check_order(wave[0], Kind::start, 2);
    planner.release(1);
    check_order(planner.take_commands().at(0), Kind::start, 3);
    CHECK(planner.num_waiting() == 0);
    planner.check_integrity();
}

void a_released_slot_is_offered_to_prefetching() {
    auto policy = std::make_unique<ScriptedPolicy>();
    policy->on_link_free = [](const ExpertCache& cache, Instructions& out) {
        if (cache.is_absent(5) && cache.can_evict(0)) out.push_back(Instruction::start_copy(5, 0));
    };
    Planner planner(kGeometry, 1, std::move(policy));
    ask(planner, 0, {0});
    planner.copy_done(0);
    CHECK(planner.take_commands().size() == 1);  // the load; the only slot is pinned
    planner.release(0);
    const auto commands = planner.take_commands();
    CHECK(commands.size() == 1);
    check_order(commands[0], Kind::start, 5);
    CHECK(commands[0].cause == Cause::prefetch);
    planner.check_integrity();
}

void releasing_an_expert_that_waits_gives_up_its_load() {
    Planner planner(kGeometry, 1, std::make_unique<ScriptedPolicy>());
    ask(planner, 0, {0, 1});
    planner.take_commands();
    planner.release(1);
    planner.copy_done(0);
    planner.release(0);
    CHECK(planner.take_commands().empty());
    planner.check_integrity();
}

void a_prefetch_that_a_gate_asks_for_is_late_and_promoted() {
    Planner planner(kGeometry, 4, prefetching({5}));
    planner.begin();
    CHECK(planner.take_commands().at(0).cause == Cause::prefetch);
    const GateOutcome outcome = ask(planner, 1, {5, 6});
    CHECK(outcome.late == 1 && outcome.misses == 1);
    const auto commands = planner.take_commands();
    check_order(commands.at(0), Kind::promote, 5);
    check_order(commands.at(1), Kind::start, 6);
    CHECK(planner.num_on_demand_in_flight() == 2 && planner.num_prefetches_in_flight() == 0);
    CHECK(planner.counters().prefetches_used == 1);
    planner.check_integrity();
}

void prefetches_pause_while_a_gate_waits() {
    Planner planner(kGeometry, 8, prefetching({5, 6, 7}), 2);
    ask(planner, 0, {0});
    CHECK(planner.take_commands().size() == 1);
    planner.copy_done(0);
    const auto commands = planner.take_commands();  // depth 2
    CHECK(commands.size() == 2);
    check_order(commands[0], Kind::start, 5);
    check_order(commands[1], Kind::start, 6);
}

void a_gate_takes_the_slot_of_a_prefetch_in_flight() {
    Planner planner(kGeometry, 1, prefetching({7}));
    planner.begin();
    const LinkCommand prefetch = planner.take_commands().at(0);
    ask(planner, 0, {0});
    const auto commands = planner.take_commands();
    check_order(commands.at(0), Kind::cancel, 7);
    check_order(commands.at(1), Kind::start, 0);
    CHECK(commands[1].slot == prefetch.slot);
    CHECK(planner.counters().prefetches_cancelled == 1);
    CHECK(planner.counters().prefetches_wasted == 1);
    planner.check_integrity();
}

void a_policy_may_cancel_its_prefetch_but_not_what_a_gate_waits_for() {
    auto policy = prefetching({5});
    policy->on_gate = [](const GateRequested&, const ExpertCache&, Instructions& out) {
        out.push_back(Instruction::cancel(5));
    };
    Planner planner(kGeometry, 4, std::move(policy));
    planner.begin();
    planner.take_commands();
    ask(planner, 1, {5});
    check_order(planner.take_commands().at(0), Kind::promote, 5);
}

std::unique_ptr<ScriptedPolicy> holding(int expert, std::vector<int> prefetches) {
    auto policy = prefetching(std::move(prefetches));
    policy->on_gate = [expert](const GateRequested& event, const ExpertCache&, Instructions& out) {
        if (event.layer == 0) out.push_back(Instruction::hold(0, expert));
    };
    return policy;
}

void a_hold_lasts_until_its_copy_is_done() {
    Planner planner(kGeometry, 4, holding(5, {5}));
    ask(planner, 0, {});
    CHECK(planner.is_held());
    planner.take_commands();
    planner.copy_done(5);
    CHECK(!planner.is_held());
}

void a_hold_on_a_copy_that_nobody_makes_lapses() {
    Planner planner(kGeometry, 4, holding(5, {}));
    ask(planner, 0, {1});
    CHECK(planner.is_held());  // the link may still be offered after the miss
    planner.take_commands();
    planner.copy_done(1);
    CHECK(!planner.is_held());
}

void a_prediction_of_an_iteration_that_is_over_is_ignored() {
    int heard = 0;
    auto policy = std::make_unique<ScriptedPolicy>();
    policy->on_prediction = [&heard](const Prediction&, const ExpertCache&, Instructions&) {
        ++heard;
    };
    Planner planner(kGeometry, 4, std::move(policy));
    planner.iteration_started({2, 1, false, 0, 0});
    Prediction prediction;
    prediction.iteration = 1;
    planner.predicted(prediction);
    CHECK(heard == 0);
    prediction.iteration = 2;
    planner.predicted(prediction);
    CHECK(heard == 1);
}

}  // namespace

int main() {
    misses_are_started_in_order_and_become_hits();
    more_experts_than_slots_come_in_waves_as_they_are_released();
    a_released_slot_is_offered_to_prefetching();
    releasing_an_expert_that_waits_gives_up_its_load();
    a_prefetch_that_a_gate_asks_for_is_late_and_promoted();
    prefetches_pause_while_a_gate_waits();
    a_gate_takes_the_slot_of_a_prefetch_in_flight();
    a_policy_may_cancel_its_prefetch_but_not_what_a_gate_waits_for();
    a_hold_lasts_until_its_copy_is_done();
    a_hold_on_a_copy_that_nobody_makes_lapses();
    a_prediction_of_an_iteration_that_is_over_is_ignored();
}
