// What passes between planner, policy and predictor, and policies by name.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "arrays.h"
#include "fmoe/map_store.h"
#include "fmoe/policies/prefetch_policy.h"
#include "fmoe/policy_factory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe {

void bind_plugin(nb::module_& m);

namespace {

void bind_events(nb::module_& m) {
    nb::enum_<Cause>(m, "Cause")
        .value("on_demand", Cause::on_demand)
        .value("prefetch", Cause::prefetch);
    nb::class_<IterationStarted>(m, "IterationStarted")
        .def_ro("iteration", &IterationStarted::iteration)
        .def_ro("num_rows", &IterationStarted::num_rows)
        .def_ro("has_prefill", &IterationStarted::has_prefill)
        .def_ro("layer_time", &IterationStarted::layer_time)
        .def_ro("load_time", &IterationStarted::load_time);
    nb::class_<GateRequested>(m, "GateRequested")
        .def_ro("layer", &GateRequested::layer)
        .def_prop_ro("needed",
                     [](const GateRequested& event) {
                         return std::vector<int>(event.needed.begin(), event.needed.end());
                     })
        .def_ro("backlog", &GateRequested::backlog);
    nb::class_<VictimNeeded>(m, "VictimNeeded")
        .def_ro("expert", &VictimNeeded::expert)
        .def_ro("cause", &VictimNeeded::cause)
        .def_ro("layer", &VictimNeeded::layer);
}

void bind_instruction(nb::module_& m) {
    nb::class_<Instruction> instruction(m, "Instruction", "What a policy orders.");
    nb::enum_<Instruction::Kind>(instruction, "Kind")
        .value("start_copy", Instruction::Kind::start_copy)
        .value("cancel", Instruction::Kind::cancel)
        .value("hold", Instruction::Kind::hold);
    instruction.def_static("start_copy", &Instruction::start_copy, "expert"_a, "victim"_a = -1)
        .def_static("cancel", &Instruction::cancel, "expert"_a)
        .def_static("hold", &Instruction::hold, "layer"_a, "expert"_a)
        .def_ro("kind", &Instruction::kind)
        .def_ro("expert", &Instruction::expert)
        .def_ro("victim", &Instruction::victim)
        .def_ro("layer", &Instruction::layer)
        .def(
            "__eq__", [](const Instruction& a, const Instruction& b) { return a == b; },
            nb::is_operator(), nb::sig("def __eq__(self, arg: object, /) -> bool"));
}

void init_prediction(Prediction* self, std::uint64_t iteration, int observed_layer, int first_layer,
                     const In<float>& p, const std::optional<In<float>>& score,
                     bool is_next_iteration) {
    require(p.ndim() == 3, "prediction: p must be [R, num_layers, J]");
    const auto num_rows = static_cast<int>(p.shape(0));
    const auto num_layers = static_cast<int>(p.shape(1));
    Prediction made = Prediction::blank(iteration, observed_layer, first_layer, num_layers,
                                        num_rows, static_cast<int>(p.shape(2)));
    made.is_next_iteration = is_next_iteration;
    std::copy_n(p.data(), made.p.size(), made.p.begin());
    const float* scores = checked(score, {num_rows, num_layers}, "score");
    for (std::size_t i = 0; i < made.score.size(); ++i)
        made.score[i] = scores == nullptr ? 1.0F : scores[i];
    new (self) Prediction(std::move(made));
}

void bind_prediction(nb::module_& m) {
    nb::class_<Prediction>(m, "Prediction",
                           "p of experts in layers from first_layer on; score 1 where not given.")
        .def("__init__", &init_prediction, "iteration"_a, "observed_layer"_a, "first_layer"_a,
             "p"_a, "score"_a = nb::none(), "is_next_iteration"_a = false)
        .def_ro("iteration", &Prediction::iteration)
        .def_ro("observed_layer", &Prediction::observed_layer)
        .def_ro("is_next_iteration", &Prediction::is_next_iteration)
        .def_ro("first_layer", &Prediction::first_layer)
        .def_ro("num_layers", &Prediction::num_layers)
        .def_ro("num_rows", &Prediction::num_rows)
        .def_prop_ro("p",
                     [](const Prediction& made) {
                         const auto num_rows = static_cast<std::size_t>(made.num_rows);
                         const auto num_layers = static_cast<std::size_t>(made.num_layers);
                         const std::size_t blocks = num_rows * num_layers;
                         const std::size_t experts = blocks == 0 ? 0 : made.p.size() / blocks;
                         return to_numpy(std::vector<float>(made.p),
                                         {num_rows, num_layers, experts});
                     })
        .def_prop_ro("score", [](const Prediction& made) {
            return to_numpy(std::vector<float>(made.score),
                            {static_cast<std::size_t>(made.num_rows),
                             static_cast<std::size_t>(made.num_layers)});
        });
}

using Predictions = std::vector<Prediction>;

Predictions start_predictor(Predictor& predictor, std::uint64_t iteration,
                            const std::vector<std::uint64_t>& requests,
                            const std::optional<In<float>>& embeddings,
                            const std::optional<std::vector<std::int32_t>>& token_ids) {
    IterationContext context;
    context.iteration = iteration;
    context.num_rows = static_cast<int>(requests.size());
    context.requests = requests.data();
    const std::vector<Phase> phases(requests.size(), Phase::decode);
    context.phases = phases.data();
    require(!token_ids || token_ids->size() == requests.size(), "token_ids must be one a row");
    if (token_ids) context.token_ids = token_ids->data();
    if (embeddings) {
        require(embeddings->ndim() == 2, "embeddings must be [R, h]");
        context.embedding_size = static_cast<int>(embeddings->shape(1));
        context.embeddings =
            checked(*embeddings, {context.num_rows, context.embedding_size}, "embeddings");
    }
    Predictions out;
    predictor.iteration_started(context, out);
    return out;
}

Predictions observe_gate(Predictor& predictor, int layer, const In<float>& probs,
                         const std::optional<In<std::uint8_t>>& chosen,
                         const std::optional<In<float>>& speculative) {
    require(probs.ndim() == 2, "probs must be [R, J]");
    const auto num_rows = static_cast<int>(probs.shape(0));
    const auto num_experts = static_cast<int>(probs.shape(1));
    GateObservation gate;
    gate.layer = layer;
    gate.num_rows = num_rows;
    gate.probs = probs.data();
    gate.chosen = checked(chosen, {num_rows, num_experts}, "chosen");
    gate.speculative = checked(speculative, {num_rows, num_experts}, "speculative");
    Predictions out;
    predictor.gate_observed(gate, out);
    return out;
}

void bind_predictor(nb::module_& m) {
    nb::class_<Predictor>(m, "Predictor", "A predictor made by make_policy, for experiments.")
        .def("iteration_started", &start_predictor, "iteration"_a, "requests"_a,
             "embeddings"_a = nb::none(), "token_ids"_a = nb::none())
        .def("gate_observed", &observe_gate, "layer"_a, "probs"_a, "chosen"_a = nb::none(),
             "speculative"_a = nb::none())
        .def("iteration_ended",
             [](Predictor& predictor) {
                 Predictions out;
                 predictor.iteration_ended(out);
                 return out;
             })
        .def("request_ended", &Predictor::request_ended, "request"_a)
        .def_prop_ro("is_synchronous", &Predictor::is_synchronous)
        .def_prop_ro("store", &Predictor::store, nb::rv_policy::reference_internal,
                     "Its MapStore, or None.");
}

PolicyParts make_by_name(const std::string& name, const Geometry& geometry, int num_slots,
                         int prefetch_distance, int store_capacity, int embedding_size,
                         const std::string& eviction, int shard, int num_shards) {
    return make_policy(name, {geometry, num_slots, prefetch_distance, store_capacity,
                              embedding_size, eviction, shard, num_shards});
}

void bind_factory(nb::module_& m) {
    nb::class_<PolicyInfo>(m, "PolicyInfo")
        .def_ro("name", &PolicyInfo::name)
        .def_ro("description", &PolicyInfo::description)
        .def_ro("predictor", &PolicyInfo::predictor);
    m.def("describe_policies", &describe_policies);
    nb::class_<PolicyParts>(m, "PolicyParts", "A policy and the predictor that it listens to.")
        .def_prop_ro(
            "predictor", [](const PolicyParts& parts) { return parts.predictor.get(); },
            nb::rv_policy::reference_internal, "None where the policy needs none.");
    m.def("make_policy", &make_by_name, "name"_a, "geometry"_a, "num_slots"_a,
          "prefetch_distance"_a, "store_capacity"_a, "embedding_size"_a, "eviction"_a, "shard"_a,
          "num_shards"_a);
    m.def(
        "select_prefetch",
        [](const In<float>& p, float score, int top_k) {
            return select_prefetch({p.data(), p.size()}, score, top_k);
        },
        "p"_a, "score"_a, "top_k"_a, "E_prefetch of one layer and row (paper 4.3).");
    m.def("prefetch_threshold", &prefetch_threshold, "score"_a, "delta (paper 4.3).");
}

}  // namespace

void bind_policy(nb::module_& m) {
    bind_events(m);
    bind_instruction(m);
    bind_prediction(m);
    bind_predictor(m);
    bind_factory(m);
    bind_plugin(m);
}

}  // namespace fmoe
