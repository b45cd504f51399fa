// native/src/bindings.cpp: the module. Only this file and bindings/ know Python; every call that
// can block releases the GIL.
#include "bindings/bindings.h"

#include <nanobind/nanobind.h>

#include "fmoe/geometry.h"

namespace nb = nanobind;
using namespace nb::literals;

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
    fmoe::bindings::bind_errors();
    bind_geometry(m);
    fmoe::bindings::bind_maps(m);
    fmoe::bindings::bind_events(m);
    fmoe::bindings::bind_policies(m);
    fmoe::bindings::bind_host_store(m);
    fmoe::bindings::bind_offloader(m);
    fmoe::bindings::bind_gates(m);
    fmoe::bindings::bind_planner(m);
    fmoe::bindings::bind_simulator(m);
}
