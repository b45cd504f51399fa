// Examples small enough to compute by hand. Experts are written as layer * J + j.
#include "fmoe/simulator.h"

#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "fmoe/clairvoyant.h"
#include "scripted_policy.h"

namespace {

using namespace fmoe;

struct TinyTrace {
    // ids [T, L, K]
    TinyTrace(Geometry geometry, std::vector<std::uint8_t> ids_TLK)
        : ids(std::move(ids_TLK)), weights(ids.size(), 1.0f) {
        view.geometry = geometry;
        view.num_tokens = ids.size() / (geometry.num_layers * geometry.top_k);
        view.expert_ids = IdArray(ids.data());
        view.weights = FloatArray(weights.data());
    }
    std::vector<Sequence> whole() const { return {{0, view.num_tokens}}; }

    std::vector<std::uint8_t> ids;
    std::vector<float> weights;
    TraceView view;
};

SimulatorOptions options(int num_slots, double load_time) {
    SimulatorOptions options;
    options.num_slots = num_slots;
    options.load_time = load_time;
    return options;
}

// One token, three layers of four experts, chooses expert 0 everywhere.
TinyTrace three_layers() { return {{3, 4, 1}, {0, 0, 0}}; }

std::unique_ptr<ScriptedPolicy> prefetching_from_gate(int first_gate, int expert) {
    auto policy = std::make_unique<ScriptedPolicy>();
    auto* self = policy.get();
    self->on_gate = [first_gate, expert, self](const GateRequested& event, const ExpertCache&,
                                               Instructions&) {
        if (event.layer != first_gate) return;
        self->on_link_free = [expert](const ExpertCache& cache, Instructions& out) {
            if (cache.is_absent(expert)) out.push_back(Instruction::start_copy(expert, -1));
        };
    };
    return policy;
}

SimulationResult run(const TinyTrace& trace, const SimulatorOptions& options,
                     std::unique_ptr<Policy> policy,
                     std::unique_ptr<Predictor> predictor = nullptr) {
    Simulator simulator(trace.view, options, std::move(policy), std::move(predictor));
    simulator.run(trace.whole());
    simulator.planner().check_integrity();
    return simulator.result();
}

void test_misses_load_before_their_layer_computes() {
    const SimulationResult result =
        run(three_layers(), options(12, 2), std::make_unique<ScriptedPolicy>());
    CHECK(result.time == 3 * (2 + 1));
    CHECK(result.stall == 6 && result.compute == 3);
    CHECK(result.counters.misses == 3 && result.counters.on_demand_loads == 3);
    CHECK(result.num_tokens == 1 && result.num_steps == 1);
}

// gate 0 at 0, loads to 2, computes to 3 while the prefetch of expert 8 moves 1 of 2; gate 1 loads
// to 5 and holds it up; while layer 1 computes to 6 the rest moves: layer 2 finds it ready.
void test_an_overtaken_prefetch_keeps_its_progress() {
    const SimulationResult result =
        run(three_layers(), options(12, 2), prefetching_from_gate(0, 8));
    CHECK(result.time == 7);
    CHECK(result.counters.hits == 1 && result.counters.late == 0);
    CHECK(result.counters.prefetches_used == 1);
}

// As above with loads of 3: 1 moved until 4, gate 1 loads to 7, 1 more until 8, 1 is waited for.
void test_a_late_prefetch_is_waited_for_as_long_as_it_still_takes() {
    const SimulationResult result =
        run(three_layers(), options(12, 3), prefetching_from_gate(0, 8));
    CHECK(result.time == 10);
    CHECK(result.counters.late == 1 && result.counters.misses == 2);
    CHECK(result.stall == 3 + 3 + 1);
}

void test_a_wrong_prefetch_costs_no_time_but_its_slot() {
    const SimulationResult result =
        run(three_layers(), options(12, 2), prefetching_from_gate(0, 9));
    CHECK(result.time == 9);
    CHECK(result.counters.prefetch_loads == 1 && result.counters.prefetches_used == 0);
}

// Cancelled at gate 1 after 1 of 2 and asked for again: it starts over and layer 2 waits for 1.
void test_a_cancelled_prefetch_keeps_nothing() {
    auto policy = prefetching_from_gate(0, 8);
    auto* self = policy.get();
    self->on_gate = [self, start = self->on_gate](const GateRequested& event,
                                                  const ExpertCache& cache, Instructions& out) {
        start(event, cache, out);
        if (event.layer == 1) out.push_back(Instruction::cancel(8));
    };
    const SimulationResult result = run(three_layers(), options(12, 2), std::move(policy));
    CHECK(result.counters.prefetches_cancelled == 1);
    CHECK(result.counters.prefetch_loads == 2 && result.counters.late == 1);
    CHECK(result.time == 3 + 3 + 1 + 1);
}

// Says at gate 0 that layer 2 will ask for expert 0.
class GateZeroPredictor final : public Predictor {
public:
    explicit GateZeroPredictor(bool is_synchronous) : is_synchronous_(is_synchronous) {}
    void iteration_started(const IterationContext& context, std::vector<Prediction>&) override {
        iteration_ = context.iteration;
    }
    void gate_observed(const GateObservation& gate, std::vector<Prediction>& out) override {
        if (gate.layer != 0) return;
        Prediction prediction{iteration_, 0, false, 2, 1, gate.num_rows, {}, {}};
        for (int row = 0; row < gate.num_rows; ++row)
            prediction.p.insert(prediction.p.end(), {0.9f, 0.1f, 0.0f, 0.0f});
        prediction.score.assign(gate.num_rows, 1.0f);
        out.push_back(prediction);
    }
    void iteration_ended(std::vector<Prediction>&) override {}
    void request_ended(std::uint64_t) override {}
    bool is_synchronous() const override { return is_synchronous_; }

private:
    bool is_synchronous_;
    std::uint64_t iteration_ = 0;
};

SimulationResult run_with_delay(double load_time, double delay, bool is_synchronous) {
    auto policy = std::make_unique<ScriptedPolicy>();
    auto* self = policy.get();
    self->on_prediction = [self](const Prediction&, const ExpertCache&, Instructions&) {
        self->on_link_free = [](const ExpertCache& cache, Instructions& out) {
            if (cache.is_absent(8)) out.push_back(Instruction::start_copy(8, -1));
        };
    };
    SimulatorOptions with_delay = options(12, load_time);
    with_delay.prediction_delay = delay;
    return run(three_layers(), with_delay, std::move(policy),
               std::make_unique<GateZeroPredictor>(is_synchronous));
}

// Known at 2.5, so 0.5 of 2 moves by 3, 1 more by 6: layer 2 waits for 0.5.
void test_inference_goes_on_while_a_prediction_is_made() {
    CHECK(run_with_delay(2, 0, false).time == 7);
    CHECK(run_with_delay(2, 2.5, false).time == 7.5);
}

// Loads of 0.5: gate 0 waits for the prediction until 2.5, in which expert 0 came.
void test_a_synchronous_predictor_is_waited_for() {
    const SimulationResult result = run_with_delay(0.5, 2.5, true);
    CHECK(result.time == 2.5 + 1 + 0.5 + 1 + 1);
    CHECK(result.counters.hits == 1);
}

void test_recall_counts_the_prediction_in_force_at_each_distance() {
    const SimulationResult result = run_with_delay(2, 0, false);
    // Layer 2 chose what was foreseen two layers before; one layer before the same was in force.
    CHECK(result.recall[0].chosen == 1 && result.recall[0].within_top_k == 1);
    CHECK(result.recall[1].chosen == 1 && result.recall[1].within_top_k == 1);
    CHECK(result.recall[2].chosen == 0);
}

void test_a_layer_larger_than_the_cache_comes_in_waves() {
    const TinyTrace trace({1, 4, 3}, {0, 1, 2});
    const SimulationResult result = run(trace, options(2, 2), std::make_unique<ScriptedPolicy>());
    CHECK(result.time == 3 * 2 + 1);
    CHECK(result.counters.on_demand_loads == 3 && result.counters.evictions == 1);
}

void test_a_batch_loads_the_union_and_replaces_ended_rows() {
    // Sequences of 1, 2 and 1 tokens; two run together: {0, 1} with union {0, 1}, then {3, 2}.
    const TinyTrace trace({1, 8, 1}, {0, 1, 2, 3});
    SimulatorOptions together = options(8, 1);
    together.batch = 2;
    Simulator simulator(trace.view, together, std::make_unique<ScriptedPolicy>(), nullptr);
    const std::vector<Sequence> sequences = {{0, 1}, {1, 2}, {3, 1}};
    simulator.run(sequences);
    const SimulationResult result = simulator.result();
    CHECK(result.num_steps == 2 && result.num_tokens == 4);
    CHECK(result.counters.misses == 4 && result.time == (2 + 1) * 2);
}

void test_prefill_tokens_are_one_step() {
    TinyTrace trace({1, 8, 1}, {0, 1, 1, 2});
    const std::vector<std::uint8_t> phase = {0, 0, 0, 1};
    trace.view.phase = phase.data();
    const SimulationResult result = run(trace, options(8, 1), std::make_unique<ScriptedPolicy>());
    CHECK(result.num_steps == 2 && result.num_tokens == 2);
    CHECK(result.time == (2 + 1) + (1 + 1));
}

void test_the_cache_is_carried_on_between_runs() {
    const TinyTrace trace = three_layers();
    Simulator simulator(trace.view, options(12, 2), std::make_unique<ScriptedPolicy>(), nullptr);
    simulator.run(trace.whole());
    simulator.run(trace.whole());
    CHECK(simulator.result().time == 9 + 3);
}

void test_warm_up_takes_no_time_and_fills_no_slot() {
    const TinyTrace trace = three_layers();
    Simulator simulator(trace.view, options(12, 2), std::make_unique<ScriptedPolicy>(),
                        std::make_unique<GateZeroPredictor>(false));
    simulator.warm_up(trace.whole());
    CHECK(simulator.result().time == 0 && simulator.planner().cache().num_free() == 12);
}

void test_wrong_options_are_refused() {
    const TinyTrace trace = three_layers();
    const auto make = [&](const SimulatorOptions& wrong) {
        Simulator(trace.view, wrong, std::make_unique<ScriptedPolicy>(), nullptr);
    };
    CHECK_THROWS(std::invalid_argument, (make(options(0, 1)), 0));
    CHECK_THROWS(std::invalid_argument, (make(options(4, -1)), 0));
    SimulatorOptions no_batch = options(4, 1);
    no_batch.batch = 0;
    CHECK_THROWS(std::invalid_argument, (make(no_batch), 0));
    const std::vector<Sequence> outside = {{1, 1}};
    Simulator simulator(trace.view, options(4, 1), std::make_unique<ScriptedPolicy>(), nullptr);
    CHECK_THROWS(std::invalid_argument, (simulator.run(outside), 0));
}

// One layer, slots for 2, a b c a: Belady gives up b; the perfect prefetcher can load nothing ahead
// without evicting what is needed sooner, except the first three.
void test_belady_evicts_what_is_needed_last() {
    const TinyTrace trace({1, 4, 1}, {0, 1, 2, 0});
    const ClairvoyantBounds bounds = clairvoyant_bounds(trace.view, trace.whole(), options(2, 2));
    CHECK(bounds.fewest_loads == 3);
    CHECK(bounds.belady == 3 * 2 + 4);
    CHECK(bounds.lower_bound == 6);
    CHECK(bounds.clairvoyant <= bounds.belady && bounds.clairvoyant >= bounds.lower_bound);
}

// After each token, expects the next to choose expert 0 everywhere.
class NextTokenPredictor final : public Predictor {
public:
    void iteration_started(const IterationContext& context, std::vector<Prediction>&) override {
        iteration_ = context.iteration;
    }
    void gate_observed(const GateObservation&, std::vector<Prediction>&) override {}
    void iteration_ended(std::vector<Prediction>& out) override {
        const std::vector<float> p = {1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0};
        out.push_back({iteration_, 2, true, 0, 3, 1, p, {1, 1, 1}});
    }
    void request_ended(std::uint64_t) override {}

private:
    std::uint64_t iteration_ = 0;
};

// Made one layer before layer 0, two before layer 1, three before layer 2 of the second token.
void test_recall_carries_a_prediction_of_the_next_iteration_over() {
    const TinyTrace trace({3, 4, 1}, {0, 0, 0, 0, 3, 0});
    const SimulationResult result = run(trace, options(12, 1), std::make_unique<ScriptedPolicy>(),
                                        std::make_unique<NextTokenPredictor>());
    CHECK(result.recall[0].chosen == 3 && result.recall[0].within_top_k == 2);
    CHECK(result.recall[1].chosen == 2 && result.recall[1].within_top_k == 1);
    CHECK(result.recall[2].chosen == 1 && result.recall[2].within_top_k == 1);
    CHECK(result.recall[3].chosen == 0);
}

void test_recall_forgets_the_prediction_for_a_request_that_ended() {
    const TinyTrace trace({3, 4, 1}, {0, 0, 0, 0, 3, 0});
    Simulator simulator(trace.view, options(12, 1), std::make_unique<ScriptedPolicy>(),
                        std::make_unique<NextTokenPredictor>());
    const std::vector<Sequence> two_requests = {{0, 1}, {1, 1}};
    simulator.run(two_requests);
    CHECK(simulator.result().recall[0].chosen == 0);
}

}  // namespace

int main() {
    test_misses_load_before_their_layer_computes();
    test_an_overtaken_prefetch_keeps_its_progress();
    test_a_late_prefetch_is_waited_for_as_long_as_it_still_takes();
    test_a_wrong_prefetch_costs_no_time_but_its_slot();
    test_a_cancelled_prefetch_keeps_nothing();
    test_inference_goes_on_while_a_prediction_is_made();
    test_a_synchronous_predictor_is_waited_for();
    test_recall_counts_the_prediction_in_force_at_each_distance();
    test_recall_carries_a_prediction_of_the_next_iteration_over();
    test_recall_forgets_the_prediction_for_a_request_that_ended();
    test_a_layer_larger_than_the_cache_comes_in_waves();
    test_a_batch_loads_the_union_and_replaces_ended_rows();
    test_prefill_tokens_are_one_step();
    test_the_cache_is_carried_on_between_runs();
    test_warm_up_takes_no_time_and_fills_no_slot();
    test_wrong_options_are_refused();
    test_belady_evicts_what_is_needed_last();
}
