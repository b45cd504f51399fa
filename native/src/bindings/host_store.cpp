#include "fmoe/host_store.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "fmoe/memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

using WritableBlob = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
using ReadOnlyBlob = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

void bind_host_store(nb::module_& m) {
    nb::class_<HostStore>(m, "HostStore", "Expert blobs in shared memory.")
        .def_static("create", &HostStore::create, "name"_a, "fingerprint"_a, "num_blobs"_a,
                    "blob_bytes"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "blob",
            [](nb::handle_t<HostStore> self, int index) {
                const auto* data = nb::cast<HostStore&>(self).blob(index);
                return ReadOnlyBlob(data, {nb::cast<HostStore&>(self).blob_bytes()}, self);
            },
            "index"_a)
        .def(
            "writable_blob",
            [](nb::handle_t<HostStore> self, int index) {
                auto* data = nb::cast<HostStore&>(self).writable_blob(index);
                return WritableBlob(data, {nb::cast<HostStore&>(self).blob_bytes()}, self);
            },
            "index"_a)
        .def("seal", &HostStore::seal)
        .def_prop_ro("name", &HostStore::name)
        .def_prop_ro("num_blobs", &HostStore::num_blobs)
        .def_prop_ro("blob_bytes", &HostStore::blob_bytes)
        .def_prop_ro("is_complete", &HostStore::is_complete);
    m.def("available_memory_bytes", &available_memory_bytes);
}

}  // namespace fmoe::bindings
