// Policies and predictors: by name, and as base classes of ones written in Python. A call into
// Python takes the GIL. A policy's input is lent for the call, a predictor's is a copy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "fmoe/map_store.h"
#include "fmoe/policies/prefetch_policy.h"
#include "fmoe/policy_factory.h"
#include "observations.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

using Predictions = std::vector<Prediction>;

// Lent to Python for one call.
template <class T>
nb::object lend(const T& value) {
    return nb::cast(&value, nb::rv_policy::reference);
}
nb::object lend(int value) { return nb::int_(value); }
nb::object lend(std::uint64_t value) { return nb::int_(value); }

// The C++ side of an object whose class is written in Python. Holding the GIL is the caller's part.
template <class Result, class Base, class... Args>
Result ask_python(const Base& self, const char* method, Args&&... args) {
    return nb::cast<Result>(nb::find(self).attr(method)(std::forward<Args>(args)...));
}

class PythonPolicy final : public Policy {
public:
    void iteration_started(const IterationStarted& event, const ExpertCache& cache,
                           Instructions& out) override {
        ask(out, "iteration_started", event, cache);
    }
    void gate_requested(const GateRequested& event, const ExpertCache& cache,
                        Instructions& out) override {
        ask(out, "gate_requested", event, cache);
    }
    void predicted(const Prediction& prediction, const ExpertCache& cache,
                   Instructions& out) override {
        ask(out, "predicted", prediction, cache);
    }
    void copy_done(int expert, const ExpertCache& cache, Instructions& out) override {
        ask(out, "copy_done", expert, cache);
    }
    void iteration_ended(const ExpertCache& cache, Instructions& out) override {
        ask(out, "iteration_ended", cache);
    }
    void request_ended(std::uint64_t request, const ExpertCache& cache,
                       Instructions& out) override {
        ask(out, "request_ended", request, cache);
    }
    void link_free(const ExpertCache& cache, Instructions& out) override {
        ask(out, "link_free", cache);
    }
    int victim(const VictimNeeded& needed, const ExpertCache& cache) override {
        const nb::gil_scoped_acquire acquire;
        return ask_python<int, Policy>(*this, "victim", lend(needed), lend(cache));
    }

private:
    template <class... Args>
    void ask(Instructions& out, const char* method, const Args&... args) const {
        const nb::gil_scoped_acquire acquire;
        const auto ordered = ask_python<Instructions, Policy>(*this, method, lend(args)...);
        out.insert(out.end(), ordered.begin(), ordered.end());
    }
};

class PythonPredictor final : public Predictor {
public:
    explicit PythonPredictor(const Geometry& geometry) : num_experts_(geometry.num_experts) {}

    void iteration_started(const IterationContext& context, Predictions& out) override {
        const nb::gil_scoped_acquire acquire;
        ask(out, "iteration_started", OwnContext::copy_of(context));
    }
    void gate_observed(const GateObservation& gate, Predictions& out) override {
        const nb::gil_scoped_acquire acquire;
        ask(out, "gate_observed", OwnGate::copy_of(gate, num_experts_));
    }
    void iteration_ended(Predictions& out) override {
        const nb::gil_scoped_acquire acquire;
        ask(out, "iteration_ended");
    }
    void request_ended(std::uint64_t request) override {
        const nb::gil_scoped_acquire acquire;
        ask_python<nb::object, Predictor>(*this, "request_ended", request);
    }
    bool is_synchronous() const override {
        const nb::gil_scoped_acquire acquire;
        return ask_python<bool, Predictor>(*this, "is_synchronous");
    }
    bool wants_speculative() const override {
        const nb::gil_scoped_acquire acquire;
        return ask_python<bool, Predictor>(*this, "wants_speculative");
    }

private:
    template <class... Args>
    void ask(Predictions& out, const char* method, Args... args) const {
        auto made = ask_python<Predictions, Predictor>(*this, method, std::move(args)...);
        std::move(made.begin(), made.end(), std::back_inserter(out));
    }

    int num_experts_;
};

bool is_python(const Policy& policy) { return dynamic_cast<const PythonPolicy*>(&policy); }
bool is_python(const Predictor& predictor) {
    return dynamic_cast<const PythonPredictor*>(&predictor);
}

// The methods as Python sees them. One that a Python class leaves out arrives here too: it orders
// nothing, and must not be dispatched to Python again.
template <auto event, class... Args>
Instructions ordered(Policy& policy, Args... args, const ExpertCache& cache) {
    Instructions out;
    if (!is_python(policy)) (policy.*event)(args..., cache, out);
    return out;
}

int victim_of(Policy& policy, const VictimNeeded& needed, const ExpertCache& cache) {
    if (is_python(policy)) throw nb::type_error("a Policy must define victim(needed, cache)");
    return policy.victim(needed, cache);
}

void bind_policy(nb::module_& m) {
    nb::class_<Policy, PythonPolicy>(
        m, "Policy",
        "The decisions: events in, instructions out. Subclass it for an experiment; only victim() "
        "must be written. Events and cache are lent for the call.")
        .def(nb::init<>())
        .def("iteration_started", &ordered<&Policy::iteration_started, const IterationStarted&>,
             "event"_a, "cache"_a)
        .def("gate_requested", &ordered<&Policy::gate_requested, const GateRequested&>, "event"_a,
             "cache"_a, "Called before the misses among event.needed are served.")
        .def("predicted", &ordered<&Policy::predicted, const Prediction&>, "prediction"_a,
             "cache"_a)
        .def("copy_done", &ordered<&Policy::copy_done, int>, "expert"_a, "cache"_a)
        .def("iteration_ended", &ordered<&Policy::iteration_ended>, "cache"_a)
        .def("request_ended", &ordered<&Policy::request_ended, std::uint64_t>, "request"_a,
             "cache"_a)
        .def("link_free", &ordered<&Policy::link_free>, "cache"_a,
             "The link can take one more prefetch: at most one Instruction.start_copy.")
        .def("victim", &victim_of, "needed"_a, "cache"_a,
             "An expert with cache.can_evict, or -1 where there is none.");
}

void bind_predictor(nb::module_& m) {
    nb::class_<Predictor, PythonPredictor>(
        m, "Predictor",
        "Says which experts the next layers will ask for. Subclass it for an experiment.")
        .def(nb::init<const Geometry&>(), "geometry"_a)
        .def(
            "iteration_started",
            [](Predictor& predictor, const OwnContext& context) {
                Predictions out;
                if (!is_python(predictor)) predictor.iteration_started(context.view(), out);
                return out;
            },
            "context"_a)
        .def(
            "gate_observed",
            [](Predictor& predictor, const OwnGate& gate) {
                Predictions out;
                if (!is_python(predictor)) predictor.gate_observed(gate.view(), out);
                return out;
            },
            "gate"_a)
        .def(
            "iteration_ended",
            [](Predictor& predictor) {
                Predictions out;
                if (!is_python(predictor)) predictor.iteration_ended(out);
                return out;
            },
            "All gates were seen: learn from them.")
        .def(
            "request_ended",
            [](Predictor& predictor, std::uint64_t request) {
                if (!is_python(predictor)) predictor.request_ended(request);
            },
            "request"_a)
        .def(
            "is_synchronous",
            [](const Predictor& predictor) {
                return !is_python(predictor) && predictor.is_synchronous();
            },
            "True: inference waits for the prediction.")
        .def(
            "wants_speculative",
            [](const Predictor& predictor) {
                return !is_python(predictor) && predictor.wants_speculative();
            },
            "True: it reads the speculative gate, which is computed for it alone.")
        .def(
            "clone", [](const Predictor& predictor) { return predictor.clone().release(); },
            nb::rv_policy::take_ownership, nb::sig("def clone(self) -> Predictor | None"),
            "One that has learnt the same and goes its own way from here; None where it cannot be "
            "copied.")
        .def("store", &Predictor::store, nb::rv_policy::reference_internal,
             nb::sig("def store(self) -> MapStore | None"),
             "The native MapStore that it learns into.");
}

PolicyParts make_by_name(const std::string& name, const Geometry& geometry, int num_slots,
                         int prefetch_distance, int store_capacity, int embedding_size,
                         const std::string& eviction, int shard, int num_shards) {
    return make_policy(name, {geometry, num_slots, prefetch_distance, store_capacity,
                              embedding_size, eviction, shard, num_shards});
}

void bind_factory(nb::module_& m) {
    nb::class_<PolicyInfo>(m, "PolicyInfo", "One line of the table of policies.")
        .def_ro("name", &PolicyInfo::name)
        .def_ro("description", &PolicyInfo::description)
        .def_ro("predictor", &PolicyInfo::predictor)
        .def_ro("parameters", &PolicyInfo::parameters, "Settings that have an effect on it.");
    m.def("describe_policies", &describe_policies);
    nb::class_<PolicyParts>(m, "PolicyParts", "A policy and the predictor that it listens to.")
        .def_prop_ro(
            "policy", [](const PolicyParts& parts) { return parts.policy.get(); },
            nb::rv_policy::reference_internal)
        .def_prop_ro(
            "predictor", [](const PolicyParts& parts) { return parts.predictor.get(); },
            nb::rv_policy::reference_internal, nb::sig("def predictor(self) -> Predictor | None"),
            "None where the policy needs none.");
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

void bind_policies(nb::module_& m) {
    bind_policy(m);
    bind_predictor(m);
    bind_factory(m);
}

}  // namespace fmoe::bindings
