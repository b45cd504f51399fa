// What passes between inference, predictor, policy and planner.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "fmoe/policy.h"
#include "observations.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

using Floats = std::optional<In<float>>;

template <class T>
std::vector<T> values_of(const std::optional<In<T>>& array) {
    return array ? std::vector<T>(array->data(), array->data() + array->size()) : std::vector<T>();
}

template <class T>
std::optional<Out<T>> rows_of(const std::vector<T>& values, int num_rows, int size) {
    if (values.empty()) return std::nullopt;
    return to_numpy(std::vector<T>(values),
                    {static_cast<std::size_t>(num_rows), static_cast<std::size_t>(size)});
}

void init_context(OwnContext* self, std::uint64_t iteration, std::vector<std::uint64_t> requests,
                  const Floats& embeddings, std::optional<std::vector<std::int32_t>> token_ids,
                  std::optional<std::vector<bool>> is_prefill) {
    const std::size_t num_rows = requests.size();
    require(!token_ids || token_ids->size() == num_rows, "token_ids must be one a row");
    require(!is_prefill || is_prefill->size() == num_rows, "is_prefill must be one a row");
    require(!embeddings || (embeddings->ndim() == 2 && embeddings->shape(0) == num_rows),
            "embeddings must be [R, h]");
    OwnContext own;
    own.iteration = iteration;
    own.requests = std::move(requests);
    own.token_ids = token_ids ? std::move(*token_ids) : std::vector<std::int32_t>(num_rows, -1);
    own.phases.assign(num_rows, Phase::decode);
    for (std::size_t row = 0; is_prefill && row < num_rows; ++row)
        if ((*is_prefill)[row]) own.phases[row] = Phase::prefill;
    own.embeddings = values_of(embeddings);
    own.embedding_size = embeddings ? static_cast<int>(embeddings->shape(1)) : 0;
    new (self) OwnContext(std::move(own));
}

void bind_context(nb::module_& m) {
    nb::class_<OwnContext>(m, "IterationContext", "What is known before the first layer. R rows.")
        .def("__init__", &init_context, "iteration"_a, "requests"_a, "embeddings"_a = nb::none(),
             "token_ids"_a = nb::none(), "is_prefill"_a = nb::none())
        .def_ro("iteration", &OwnContext::iteration)
        .def_ro("requests", &OwnContext::requests)
        .def_ro("token_ids", &OwnContext::token_ids)
        .def_prop_ro("is_prefill",
                     [](const OwnContext& own) {
                         std::vector<bool> found;
                         for (Phase phase : own.phases) found.push_back(phase == Phase::prefill);
                         return found;
                     })
        .def_prop_ro(
            "embeddings",
            [](const OwnContext& own) {
                return rows_of(own.embeddings, static_cast<int>(own.requests.size()),
                               own.embedding_size);
            },
            nb::rv_policy::move, "[R, h], or None.");
}

void init_gate(OwnGate* self, int layer, const In<float>& probs,
               const std::optional<In<std::uint8_t>>& chosen, const Floats& speculative) {
    require(probs.ndim() == 2, "probs must be [R, J]");
    const auto num_rows = static_cast<int>(probs.shape(0));
    const auto num_experts = static_cast<int>(probs.shape(1));
    checked(chosen, {num_rows, num_experts}, "chosen");
    checked(speculative, {num_rows, num_experts}, "speculative");
    new (self) OwnGate{layer,
                       num_rows,
                       num_experts,
                       {probs.data(), probs.data() + probs.size()},
                       values_of(chosen),
                       values_of(speculative)};
}

void bind_gate(nb::module_& m) {
    nb::class_<OwnGate>(m, "GateObservation", "One layer's gate, seen by every row; arrays [R, J].")
        .def("__init__", &init_gate, "layer"_a, "probs"_a, "chosen"_a = nb::none(),
             "speculative"_a = nb::none())
        .def_ro("layer", &OwnGate::layer)
        .def_prop_ro(
            "probs",
            [](const OwnGate& own) {
                return to_numpy(std::vector<float>(own.probs),
                                {static_cast<std::size_t>(own.num_rows),
                                 static_cast<std::size_t>(own.num_experts)});
            },
            nb::rv_policy::move)
        .def_prop_ro(
            "chosen",
            [](const OwnGate& own) { return rows_of(own.chosen, own.num_rows, own.num_experts); },
            nb::rv_policy::move, "1 where a token of the row chose the expert, or None.")
        .def_prop_ro(
            "speculative",
            [](const OwnGate& own) {
                return rows_of(own.speculative, own.num_rows, own.num_experts);
            },
            nb::rv_policy::move, "Gate layer + 1 on this layer's hidden state, or None.");
}

void bind_planner_events(nb::module_& m) {
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
            nb::is_operator(), nb::sig("def __eq__(self, arg: object, /) -> bool"))
        .def("__repr__", [](const Instruction& i) {
            return nb::str("Instruction({}, expert={}, victim={}, layer={})")
                .format(nb::cast(i.kind), i.expert, i.victim, i.layer);
        });
}

void init_prediction(Prediction* self, std::uint64_t iteration, int observed_layer, int first_layer,
                     const In<float>& p, const Floats& score, bool is_next_iteration) {
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
                           "p [R, num_layers, J] of the layers from first_layer on; score "
                           "[R, num_layers], 1 where not given.")
        .def("__init__", &init_prediction, "iteration"_a, "observed_layer"_a, "first_layer"_a,
             "p"_a, "score"_a = nb::none(), "is_next_iteration"_a = false)
        .def_ro("iteration", &Prediction::iteration)
        .def_ro("observed_layer", &Prediction::observed_layer)
        .def_ro("is_next_iteration", &Prediction::is_next_iteration)
        .def_ro("first_layer", &Prediction::first_layer)
        .def_ro("num_layers", &Prediction::num_layers)
        .def_ro("num_rows", &Prediction::num_rows)
        .def_prop_ro(
            "p",
            [](const Prediction& made) {
                const std::size_t blocks = made.score.size();
                return to_numpy(std::vector<float>(made.p),
                                {static_cast<std::size_t>(made.num_rows),
                                 static_cast<std::size_t>(made.num_layers),
                                 blocks == 0 ? 0 : made.p.size() / blocks});
            },
            nb::rv_policy::move)
        .def_prop_ro(
            "later",
            [](const Prediction& made) {
                const std::size_t blocks = made.score.size();
                return to_numpy(std::vector<float>(made.later),
                                {static_cast<std::size_t>(made.num_rows),
                                 static_cast<std::size_t>(made.num_layers),
                                 blocks == 0 ? 0 : made.later.size() / blocks});
            },
            nb::rv_policy::move)
        .def_prop_ro(
            "score",
            [](const Prediction& made) {
                return to_numpy(std::vector<float>(made.score),
                                {static_cast<std::size_t>(made.num_rows),
                                 static_cast<std::size_t>(made.num_layers)});
            },
            nb::rv_policy::move);
}

}  // namespace

void bind_events(nb::module_& m) {
    bind_context(m);
    bind_gate(m);
    bind_planner_events(m);
    bind_instruction(m);
    bind_prediction(m);
}

}  // namespace fmoe::bindings
