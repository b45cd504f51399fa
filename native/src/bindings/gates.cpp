#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "fmoe/gate_server.h"
#include "py_offloader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

// The server with the GPU side of its mailbox.
class PyCudaGates {
public:
    PyCudaGates(PyOffloader& offloader, const Geometry& geometry, int max_rows, int device,
                std::uint64_t table, double timeout_s)
        : layout_{geometry, max_rows} {
        auto gates = std::make_unique<CudaGates>(device, layout_, table);
        gates_ = gates.get();
        server_ = std::make_unique<GateServer>(*offloader, layout_, gates_->mailbox(),
                                               std::move(gates), timeout_s);
    }

    GateServer& server() { return *server_; }
    void enqueue(int layer, std::uintptr_t stream) const {
        gates_->enqueue(layer, reinterpret_cast<CudaStream>(stream));
    }
    std::uintptr_t chosen(int layer) const { return at(layout_.chosen(layer)); }
    std::uintptr_t probs(int layer) const { return at(layout_.probs(layer)); }

private:
    std::uintptr_t at(std::size_t offset) const { return gates_->mailbox_address() + offset; }

    GateMailbox layout_;
    CudaGates* gates_ = nullptr;
    std::unique_ptr<GateServer> server_;
};

}  // namespace

void bind_gates(nb::module_& m) {
    const auto release = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<PyCudaGates>(m, "CudaGates", "Answers the gates of a step that runs as one graph.")
        .def(nb::init<PyOffloader&, const Geometry&, int, int, std::uint64_t, double>(),
             "offloader"_a, "geometry"_a, nb::kw_only(), "max_rows"_a, "device"_a, "table"_a,
             "timeout_s"_a, nb::keep_alive<1, 2>())
        .def("chosen_address", &PyCudaGates::chosen, "layer"_a, "int32 [max_rows, K]")
        .def("probs_address", &PyCudaGates::probs, "layer"_a, "float32 [max_rows, J]")
        .def("enqueue", &PyCudaGates::enqueue, "layer"_a, "stream"_a)
        .def(
            "begin_step",
            [](PyCudaGates& self, int num_rows) { self.server().begin_step(num_rows); },
            "num_rows"_a, release)
        .def(
            "end_step", [](PyCudaGates& self) { self.server().end_step(); }, release)
        .def("close", [](PyCudaGates& self) { self.server().close(); }, release);
}

}  // namespace fmoe::bindings
