// native/src/bindings.cpp: the only file that knows Python. One bind_* function a concept; every
// call that can block releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "fmoe/planner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe {
void bind_maps(nb::module_& m);
void bind_policy(nb::module_& m);
void bind_planner(nb::module_& m);
void bind_simulator(nb::module_& m);
}  // namespace fmoe

namespace {

void bind_geometry(nb::module_& m) {
    nb::class_<fmoe::Geometry>(m, "Geometry", "Layers, experts per layer, experts per token.")
        .def(
            "__init__",
            [](fmoe::Geometry* self, int num_layers, int num_experts, int top_k) {
                fmoe::Geometry geometry{num_layers, num_experts, top_k};
                geometry.validate();
                new (self) fmoe::Geometry(geometry);
            },
            "num_layers"_a, "num_experts"_a, "top_k"_a)
        .def_ro("num_layers", &fmoe::Geometry::num_layers)
        .def_ro("num_experts", &fmoe::Geometry::num_experts)
        .def_ro("top_k", &fmoe::Geometry::top_k);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native core of fmoe_ray.";
    bind_geometry(m);
    fmoe::bind_maps(m);
    fmoe::bind_policy(m);
    fmoe::bind_planner(m);
    fmoe::bind_simulator(m);
}
