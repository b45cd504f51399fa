// One bind_* function a concept; bindings.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace fmoe::bindings {

void bind_errors();
void bind_maps(nanobind::module_& m);
void bind_events(nanobind::module_& m);
void bind_policies(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_host_store(nanobind::module_& m);
void bind_offloader(nanobind::module_& m);
void bind_gates(nanobind::module_& m);
void bind_simulator(nanobind::module_& m);

}  // namespace fmoe::bindings
