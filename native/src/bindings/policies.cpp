#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "fmoe/policy_factory.h"

namespace nb = nanobind;

namespace fmoe::bindings {

void bind_policies(nb::module_& m) {
    nb::class_<Policy>(m, "Policy", "Decides on prefetches and victims.");
    nb::class_<Predictor>(m, "Predictor", "Says which experts the next layers will ask for.");
    m.def("list_policies", &list_policies, "Names that a policy can be asked for by.");
}

}  // namespace fmoe::bindings
