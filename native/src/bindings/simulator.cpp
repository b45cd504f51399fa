// Simulator and clairvoyant bounds over numpy arrays, which are used where they lie.
#include "fmoe/simulator.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "borrowed.h"
#include "fmoe/clairvoyant.h"
#include "fmoe/policy_factory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using TokenIds = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Phases = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using StartsAndLengths = std::vector<std::pair<std::size_t, std::size_t>>;

IdArray to_ids(const Array& array) {
    if (array.dtype() == nb::dtype<std::uint8_t>())
        return IdArray(static_cast<const std::uint8_t*>(array.data()));
    require(array.dtype() == nb::dtype<std::uint16_t>(), "trace: expert_ids must be u8 or u16");
    return IdArray(static_cast<const std::uint16_t*>(array.data()));
}

FloatArray to_floats(const std::optional<Array>& array) {
    if (!array) return {};
    if (array->dtype() == nb::dtype<float>())
        return FloatArray(static_cast<const float*>(array->data()));
    const bool is_half =
        array->dtype().code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) &&
        array->dtype().bits == 16;
    require(is_half, "trace: weights, probs and embeddings must be f16 or f32");
    return FloatArray(static_cast<const Half*>(array->data()));
}

// The view and what keeps its arrays alive.
struct Trace {
    TraceView view;
    std::tuple<Array, Array, std::optional<Array>, std::optional<Array>, std::optional<Array>,
               std::optional<TokenIds>, std::optional<Phases>>
        arrays;
};

void init_trace(Trace* self, int num_experts, Array expert_ids, Array weights,
                std::optional<Array> probs, std::optional<Array> spec_probs,
                std::optional<Array> embeddings, std::optional<TokenIds> token_ids,
                std::optional<Phases> phase) {
    require(expert_ids.ndim() == 3, "trace: expert_ids must be [T, L, K]");
    TraceView view;
    view.geometry = {static_cast<int>(expert_ids.shape(1)), num_experts,
                     static_cast<int>(expert_ids.shape(2))};
    view.geometry.validate();
    view.num_tokens = expert_ids.shape(0);
    view.expert_ids = to_ids(expert_ids);
    view.weights = to_floats(weights);
    view.probs = to_floats(probs);
    view.spec_probs = to_floats(spec_probs);
    view.embeddings = to_floats(embeddings);
    view.embedding_size = embeddings ? static_cast<int>(embeddings->shape(1)) : 0;
    view.token_ids = token_ids ? token_ids->data() : nullptr;
    view.phase = phase ? phase->data() : nullptr;
    new (self) Trace{view, {expert_ids, weights, probs, spec_probs, embeddings, token_ids, phase}};
}

std::vector<Sequence> to_sequences(const StartsAndLengths& pairs) {
    std::vector<Sequence> sequences;
    for (const auto& [start, length] : pairs) sequences.push_back({start, length});
    return sequences;
}

void bind_trace(nb::module_& m) {
    nb::class_<Trace>(m, "TraceView",
                      "A routing trace in the caller's arrays, which it keeps alive. Their shapes "
                      "and ranges must have been checked.")
        .def("__init__", &init_trace, "num_experts"_a, "expert_ids"_a, "weights"_a,
             "probs"_a = nb::none(), "spec_probs"_a = nb::none(), "embeddings"_a = nb::none(),
             "token_ids"_a = nb::none(), "phase"_a = nb::none());
}

void bind_result(nb::module_& m) {
    nb::class_<RecallCount>(m, "RecallCount")
        .def_ro("chosen", &RecallCount::chosen)
        .def_ro("within_top_k", &RecallCount::within_top_k)
        .def_ro("within_top_2k", &RecallCount::within_top_2k);
    nb::class_<SimulationResult>(m, "SimulationResult", "Totals of everything run so far.")
        .def_ro("num_steps", &SimulationResult::num_steps)
        .def_ro("num_tokens", &SimulationResult::num_tokens)
        .def_ro("time", &SimulationResult::time)
        .def_ro("compute", &SimulationResult::compute)
        .def_ro("stall", &SimulationResult::stall)
        .def_ro("decode_tokens", &SimulationResult::decode_tokens)
        .def_ro("decode_time", &SimulationResult::decode_time)
        .def_prop_ro("hits", [](const SimulationResult& r) { return r.counters.hits; })
        .def_prop_ro("late", [](const SimulationResult& r) { return r.counters.late; })
        .def_prop_ro("misses", [](const SimulationResult& r) { return r.counters.misses; })
        .def_prop_ro("on_demand_loads",
                     [](const SimulationResult& r) { return r.counters.on_demand_loads; })
        .def_prop_ro("prefetch_loads",
                     [](const SimulationResult& r) { return r.counters.prefetch_loads; })
        .def_prop_ro("prefetches_used",
                     [](const SimulationResult& r) { return r.counters.prefetches_used; })
        .def_prop_ro("prefetches_wasted",
                     [](const SimulationResult& r) { return r.counters.prefetches_wasted; })
        .def_prop_ro("prefetches_cancelled",
                     [](const SimulationResult& r) { return r.counters.prefetches_cancelled; })
        .def_prop_ro("evictions", [](const SimulationResult& r) { return r.counters.evictions; })
        .def_prop_ro(
            "recall",
            [](const SimulationResult& r) {
                return std::vector<RecallCount>(r.recall.begin(), r.recall.end());
            },
            "Entry d - 1: of the predictions in force d layers before their layer.");
}

void init_simulator(Simulator* self, const Trace& trace, const std::string& policy, int num_slots,
                    double load_time, int batch, const std::string& eviction, int prefetch_distance,
                    int store_capacity, double prediction_delay, int prefetch_depth,
                    Policy* own_policy, Predictor* own_predictor) {
    PolicyParams params;
    params.geometry = trace.view.geometry;
    params.num_slots = num_slots;
    params.eviction = eviction;
    params.prefetch_distance = prefetch_distance;
    params.store_capacity = store_capacity;
    params.embedding_size = TraceFeed::embedding_size(trace.view);
    PolicyParts parts;
    if (own_policy == nullptr)
        parts = make_policy(policy, params);
    else
        parts.policy = std::make_unique<BorrowedPolicy>(*own_policy);
    if (own_predictor != nullptr)
        parts.predictor = std::make_unique<BorrowedPredictor>(*own_predictor);
    const SimulatorOptions options{num_slots, load_time, batch, prediction_delay, prefetch_depth};
    new (self) Simulator(trace.view, options, std::move(parts.policy), std::move(parts.predictor));
}

void bind_bounds(nb::module_& m) {
    nb::class_<ClairvoyantBounds>(m, "ClairvoyantBounds", "Times of a whole run.")
        .def_ro("belady", &ClairvoyantBounds::belady)
        .def_ro("perfect_prefetch", &ClairvoyantBounds::perfect_prefetch)
        .def_ro("clairvoyant", &ClairvoyantBounds::clairvoyant)
        .def_ro("lower_bound", &ClairvoyantBounds::lower_bound)
        .def_ro("fewest_loads", &ClairvoyantBounds::fewest_loads)
        .def_ro("num_tokens", &ClairvoyantBounds::num_tokens);
    m.def(
        "clairvoyant_bounds",
        [](const Trace& trace, const StartsAndLengths& sequences, int num_slots, double load_time,
           int batch) {
            const nb::gil_scoped_release release;
            SimulatorOptions options;
            options.num_slots = num_slots;
            options.load_time = load_time;
            options.batch = batch;
            return fmoe::clairvoyant_bounds(trace.view, to_sequences(sequences), options);
        },
        "trace"_a, "sequences"_a, "num_slots"_a, "load_time"_a, "batch"_a = 1);
}

}  // namespace

void bind_simulator(nb::module_& m) {
    bind_trace(m);
    bind_result(m);
    bind_bounds(m);
    nb::class_<Simulator>(m, "Simulator", "One policy over one trace; see fmoe/simulator.h.")
        .def("__init__", &init_simulator, nb::keep_alive<1, 2>(), nb::keep_alive<1, 12>(),
             nb::keep_alive<1, 13>(), "trace"_a, "policy"_a, "num_slots"_a, "load_time"_a,
             nb::kw_only(), "batch"_a = 1, "eviction"_a = "policy", "prefetch_distance"_a = 3,
             "store_capacity"_a = 1000, "prediction_delay"_a = 0.0, "prefetch_depth"_a = 1,
             "own_policy"_a = nb::none(), "own_predictor"_a = nb::none())
        .def(
            "warm_up",
            [](Simulator& self, const StartsAndLengths& sequences) {
                const nb::gil_scoped_release release;
                self.warm_up(to_sequences(sequences));
            },
            "sequences"_a)
        .def(
            "run",
            [](Simulator& self, const StartsAndLengths& sequences) {
                const nb::gil_scoped_release release;
                self.run(to_sequences(sequences));
            },
            "sequences"_a)
        .def_prop_ro("can_clone_predictor",
                     [](const Simulator& self) {
                         return self.predictor() != nullptr && self.predictor()->can_clone();
                     })
        .def(
            "clone_predictor",
            [](const Simulator& self) {
                return self.predictor() == nullptr ? nullptr : self.predictor()->clone().release();
            },
            nb::rv_policy::take_ownership, nb::sig("def clone_predictor(self) -> Predictor | None"),
            "As the predictor is now; None unless can_clone_predictor.")
        .def("result", &Simulator::result)
        .def("check_integrity", [](const Simulator& self) { self.planner().check_integrity(); });
}

}  // namespace fmoe::bindings
