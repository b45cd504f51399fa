// Planner and its cache, for experiments and tests.
#include "fmoe/planner.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "bindings.h"
#include "borrowed.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

int checked(const ExpertCache& cache, int expert) {
    if (expert < 0 || expert >= cache.geometry().size())
        throw std::out_of_range("expert " + std::to_string(expert) + " of " +
                                std::to_string(cache.geometry().size()));
    return expert;
}

template <class Question>
auto of_expert(Question question) {
    return [question](const ExpertCache& cache, int expert) {
        return (cache.*question)(checked(cache, expert));
    };
}

void bind_cache(nb::module_& m) {
    nb::class_<ExpertCache>(m, "ExpertCache", "Which expert lies in which slot; read-only.")
        .def_prop_ro("geometry", &ExpertCache::geometry)
        .def_prop_ro("num_slots", &ExpertCache::num_slots)
        .def_prop_ro("num_free", &ExpertCache::num_free)
        .def_prop_ro("residents",
                     [](const ExpertCache& cache) { return std::vector<int>(cache.residents()); })
        .def("is_absent", of_expert(&ExpertCache::is_absent), "expert"_a)
        .def("is_ready", of_expert(&ExpertCache::is_ready), "expert"_a)
        .def("is_loading", of_expert(&ExpertCache::is_loading), "expert"_a)
        .def("is_pinned", of_expert(&ExpertCache::is_pinned), "expert"_a)
        .def("can_evict", of_expert(&ExpertCache::can_evict), "expert"_a)
        .def("is_unused_prefetch", of_expert(&ExpertCache::is_unused_prefetch), "expert"_a)
        .def("slot", of_expert(&ExpertCache::slot), "expert"_a)
        .def("frequency", of_expert(&ExpertCache::frequency), "expert"_a)
        .def("last_use", of_expert(&ExpertCache::last_use), "expert"_a);
}

void bind_command(nb::module_& m) {
    nb::class_<LinkCommand> command(m, "LinkCommand", "An order to the link.");
    nb::enum_<LinkCommand::Kind>(command, "Kind")
        .value("start", LinkCommand::Kind::start)
        .value("promote", LinkCommand::Kind::promote)
        .value("cancel", LinkCommand::Kind::cancel);
    command.def_ro("kind", &LinkCommand::kind)
        .def_ro("expert", &LinkCommand::expert)
        .def_ro("slot", &LinkCommand::slot)
        .def_ro("cause", &LinkCommand::cause);
}

void init_planner(Planner* self, const Geometry& geometry, int num_slots, Policy& policy,
                  int prefetch_depth) {
    new (self)
        Planner(geometry, num_slots, std::make_unique<BorrowedPolicy>(policy), prefetch_depth);
}

}  // namespace

void bind_planner(nb::module_& m) {
    bind_cache(m);
    bind_command(m);
    nb::class_<Planner>(m, "Planner", "Wrapped by fmoe_ray.policy.planner.")
        .def("__init__", &init_planner, "geometry"_a, "num_slots"_a, "policy"_a, "prefetch_depth"_a,
             nb::keep_alive<1, 4>())
        .def_prop_ro("cache", &Planner::cache, nb::rv_policy::reference_internal)
        .def_prop_ro("counters", [](const Planner& p) { return p.counters(); })
        .def(
            "iteration_started",
            [](Planner& p, std::uint64_t iteration, int num_rows, bool has_prefill,
               double layer_time, double load_time) {
                p.iteration_started({iteration, num_rows, has_prefill, layer_time, load_time});
            },
            "iteration"_a, "num_rows"_a, "has_prefill"_a, "layer_time"_a, "load_time"_a)
        .def(
            "gate_requested",
            [](Planner& p, int layer, const std::vector<int>& needed, double backlog) {
                for (int expert : needed) checked(p.cache(), expert);
                return p.gate_requested({layer, needed, backlog});
            },
            "layer"_a, "needed"_a, "backlog"_a)
        .def("predicted", &Planner::predicted, "prediction"_a)
        .def("copy_done", &Planner::copy_done, "expert"_a)
        .def("release", &Planner::release, "expert"_a)
        .def("release_all", &Planner::release_all)
        .def("iteration_ended", &Planner::iteration_ended)
        .def("request_ended", &Planner::request_ended, "request"_a)
        .def_prop_ro("is_held", &Planner::is_held)
        .def_prop_ro("num_waiting", &Planner::num_waiting)
        .def("take_commands", &Planner::take_commands)
        .def("check_integrity", &Planner::check_integrity);
}

}  // namespace fmoe::bindings
