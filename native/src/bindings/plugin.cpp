// Policies and predictors written in Python: an adapter takes the GIL and asks the Python object.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "arrays.h"
#include "fmoe/policy_factory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe {

namespace {

// A Python object that native code calls and drops, on any thread. The caller of call() has the
// GIL.
class SharedObject {
public:
    explicit SharedObject(nb::object object) : object_(std::move(object)) {}
    SharedObject(const SharedObject&) = delete;
    SharedObject& operator=(const SharedObject&) = delete;
    ~SharedObject() {
        const nb::gil_scoped_acquire acquire;
        object_.reset();
    }

    template <class T, class... Args>
    T call(const char* method, Args&&... args) const {
        return nb::cast<T>(object_.attr(method)(std::forward<Args>(args)...));
    }

private:
    nb::object object_;
};

// Valid in Python during the call only.
template <class T>
nb::object lend(const T& value) {
    return nb::cast(&value, nb::rv_policy::reference);
}
nb::object lend(int value) { return nb::int_(value); }
nb::object lend(std::uint64_t value) { return nb::int_(value); }

class PythonPolicy final : public Policy {
public:
    explicit PythonPolicy(nb::object object) : object_(std::move(object)) {}

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
        return object_.call<int>("victim", lend(needed), lend(cache));
    }

private:
    template <class... Args>
    void ask(Instructions& out, const char* method, const Args&... args) const {
        const nb::gil_scoped_acquire acquire;
        const auto ordered = object_.call<Instructions>(method, lend(args)...);
        out.insert(out.end(), ordered.begin(), ordered.end());
    }

    SharedObject object_;
};

class PythonPredictor final : public Predictor {
public:
    PythonPredictor(int num_experts, nb::object object)
        : num_experts_(num_experts), object_(std::move(object)) {}

    void iteration_started(const IterationContext& context, std::vector<Prediction>& out) override {
        const nb::gil_scoped_acquire acquire;
        append(out, object_.call<std::vector<Prediction>>("iteration_started", lend(context)));
    }
    void gate_observed(const GateObservation& gate, std::vector<Prediction>& out) override {
        const nb::gil_scoped_acquire acquire;
        append(out, object_.call<std::vector<Prediction>>(
                        "gate_observed", gate.layer, rows(gate, gate.probs),
                        rows(gate, gate.chosen), rows(gate, gate.speculative)));
    }
    void iteration_ended(std::vector<Prediction>& out) override {
        const nb::gil_scoped_acquire acquire;
        append(out, object_.call<std::vector<Prediction>>("iteration_ended"));
    }
    void request_ended(std::uint64_t request) override {
        const nb::gil_scoped_acquire acquire;
        object_.call<nb::object>("request_ended", request);
    }
    bool is_synchronous() const override {
        const nb::gil_scoped_acquire acquire;
        return object_.call<bool>("is_synchronous");
    }

private:
    // A copy that Python may keep, or None.
    template <class T>
    nb::object rows(const GateObservation& gate, const T* values) const {
        if (values == nullptr) return nb::none();
        const auto num_rows = static_cast<std::size_t>(gate.num_rows);
        const auto num_experts = static_cast<std::size_t>(num_experts_);
        return nb::cast(to_numpy(std::vector<T>(values, values + num_rows * num_experts),
                                 {num_rows, num_experts}));
    }
    static void append(std::vector<Prediction>& out, std::vector<Prediction> made) {
        std::move(made.begin(), made.end(), std::back_inserter(out));
    }

    int num_experts_;
    SharedObject object_;
};

void bind_context(nb::module_& m) {
    nb::class_<IterationContext>(m, "IterationContext",
                                 "What is known before the first layer; arrays are copies.")
        .def_ro("iteration", &IterationContext::iteration)
        .def_ro("num_rows", &IterationContext::num_rows)
        .def_prop_ro("requests",
                     [](const IterationContext& c) {
                         return std::vector<std::uint64_t>(c.requests, c.requests + c.num_rows);
                     })
        .def_prop_ro(
            "is_prefill",
            [](const IterationContext& c) {
                std::vector<bool> found;
                for (int row = 0; row < c.num_rows; ++row)
                    found.push_back(c.phases != nullptr && c.phases[row] == Phase::prefill);
                return found;
            })
        .def_prop_ro("token_ids",
                     [](const IterationContext& c) {
                         if (c.token_ids == nullptr)
                             return std::vector<std::int32_t>(static_cast<std::size_t>(c.num_rows),
                                                              -1);
                         return std::vector<std::int32_t>(c.token_ids, c.token_ids + c.num_rows);
                     })
        .def_prop_ro(
            "embeddings",
            [](const IterationContext& c) -> std::optional<Out<float>> {
                if (c.embeddings == nullptr) return std::nullopt;
                const auto num_rows = static_cast<std::size_t>(c.num_rows);
                const auto size = static_cast<std::size_t>(c.embedding_size);
                return to_numpy(std::vector<float>(c.embeddings, c.embeddings + num_rows * size),
                                {num_rows, size});
            },
            "[R, h], or None.");
}

}  // namespace

void bind_plugin(nb::module_& m) {
    bind_context(m);
    m.def(
        "plugin_policy",
        [](const Geometry& geometry, nb::object policy, nb::object predictor) {
            PolicyParts parts;
            parts.policy = std::make_unique<PythonPolicy>(std::move(policy));
            if (!predictor.is_none())
                parts.predictor =
                    std::make_unique<PythonPredictor>(geometry.num_experts, std::move(predictor));
            return parts;
        },
        "geometry"_a, "policy"_a, "predictor"_a.none(),
        "Parts that ask objects with the methods of fmoe_ray.policy.Policy and Predictor.");
}

}  // namespace fmoe
