#include "fmoe/offloader.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "fmoe/map_store.h"
#include "py_offloader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmoe::bindings {

namespace {

template <class T, int N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Arena = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>>;

void construct(PyOffloader* self, std::shared_ptr<HostStore> store, const Geometry& geometry,
               int num_slots, const std::string& policy, const std::string& eviction,
               int prefetch_distance, int store_capacity, int embedding_size,
               std::size_t chunk_bytes, int prefetch_depth, std::optional<double> link_gbps,
               double timeout_s, int shard, int num_shards, Policy* own_policy,
               Predictor* own_predictor, std::optional<int> cuda_device) {
    const PolicyParams params{geometry,       num_slots,      prefetch_distance,
                              store_capacity, embedding_size, eviction,
                              shard,          num_shards};
    OffloaderOptions options;
    options.geometry = geometry;
    options.chunk_bytes = chunk_bytes;
    options.prefetch_depth = prefetch_depth;
    options.timeout_s = timeout_s;
    options.shard = shard;
    options.num_shards = num_shards;
    new (self) PyOffloader(std::move(store), policy, params, options, link_gbps, own_policy,
                           own_predictor, cuda_device);
}

Arena arena(nb::handle_t<PyOffloader> self) {
    Offloader& offloader = *nb::cast<PyOffloader&>(self);
    Device& device = offloader.device();
    return Arena(reinterpret_cast<std::uint8_t*>(device.arena()),
                 {static_cast<std::size_t>(device.num_slots()), offloader.store().blob_bytes()},
                 self, {static_cast<std::int64_t>(device.slot_stride_bytes()), 1});
}

void begin_iteration(PyOffloader& self, const Array<std::int64_t, 1>& requests,
                     const Array<std::uint8_t, 1>& phases, const Array<std::int32_t, 1>& token_ids,
                     const std::optional<Array<float, 2>>& embeddings) {
    const std::size_t num_rows = requests.shape(0);
    require(phases.shape(0) == num_rows && token_ids.shape(0) == num_rows &&
                (!embeddings || embeddings->shape(0) == num_rows),
            "requests, phases, token_ids and embeddings must have the same number of rows");
    for (std::size_t row = 0; row < num_rows; ++row)
        require(phases.data()[row] <= 1, "phases must be 0 (prefill) or 1 (decode)");
    IterationContext context;
    context.num_rows = static_cast<int>(num_rows);
    context.requests = reinterpret_cast<const std::uint64_t*>(requests.data());
    context.phases = reinterpret_cast<const Phase*>(phases.data());
    context.token_ids = token_ids.data();
    if (embeddings) {
        context.embeddings = embeddings->data();
        context.embedding_size = static_cast<int>(embeddings->shape(1));
    }
    self.unlocked([&] { self->begin_iteration(context); });
}

void request(PyOffloader& self, int layer, const Array<std::int32_t, 2>& chosen,
             const Array<std::int32_t, 1>& row_of_token) {
    require(chosen.shape(0) == row_of_token.shape(0),
            "chosen [T, K] and row_of_token [T] must have the same number of tokens");
    self.unlocked([&] {
        self->request(layer, {chosen.data(), chosen.size()},
                      {row_of_token.data(), row_of_token.size()});
    });
}

void publish_gate(PyOffloader& self, int layer, const Array<float, 2>& probs,
                  const std::optional<Array<std::uint8_t, 2>>& chosen,
                  const std::optional<Array<float, 2>>& speculative, int num_experts) {
    const auto has_shape = [&](const auto& array) {
        return array.shape(0) == probs.shape(0) &&
               array.shape(1) == static_cast<std::size_t>(num_experts);
    };
    require(has_shape(probs) && (!chosen || has_shape(*chosen)) &&
                (!speculative || has_shape(*speculative)),
            "probs, chosen and speculative must be [R, J] alike");
    GateObservation gate;
    gate.layer = layer;
    gate.num_rows = static_cast<int>(probs.shape(0));
    gate.probs = probs.data();
    if (chosen) gate.chosen = chosen->data();
    if (speculative) gate.speculative = speculative->data();
    self.unlocked([&] { self->publish_gate(gate); });
}

void bind_counters(nb::module_& m) {
    nb::class_<GateOutcome>(m, "GateOutcome")
        .def_ro("hits", &GateOutcome::hits)
        .def_ro("late", &GateOutcome::late)
        .def_ro("misses", &GateOutcome::misses);
    nb::class_<TransferCounters>(m, "TransferCounters")
        .def_ro("bytes_on_demand", &TransferCounters::bytes_on_demand)
        .def_ro("bytes_prefetched", &TransferCounters::bytes_prefetched)
        .def_ro("bytes_prefetch_used", &TransferCounters::bytes_prefetch_used)
        .def_ro("bytes_prefetch_wasted", &TransferCounters::bytes_prefetch_wasted)
        .def_ro("copies", &TransferCounters::copies)
        .def_ro("cancelled", &TransferCounters::cancelled)
        .def_ro("preemptions", &TransferCounters::preemptions);
    nb::class_<PlannerCounters>(m, "PlannerCounters")
        .def_ro("hits", &PlannerCounters::hits)
        .def_ro("late", &PlannerCounters::late)
        .def_ro("misses", &PlannerCounters::misses)
        .def_ro("on_demand_loads", &PlannerCounters::on_demand_loads)
        .def_ro("prefetch_loads", &PlannerCounters::prefetch_loads)
        .def_ro("prefetches_used", &PlannerCounters::prefetches_used)
        .def_ro("prefetches_wasted", &PlannerCounters::prefetches_wasted)
        .def_ro("prefetches_cancelled", &PlannerCounters::prefetches_cancelled)
        .def_ro("evictions", &PlannerCounters::evictions);
    nb::class_<PredictionScore>(m, "PredictionScore")
        .def_ro("count", &PredictionScore::count)
        .def_ro("sum", &PredictionScore::sum);
    nb::class_<OffloaderCounters>(m, "OffloaderCounters")
        .def_ro("planner", &OffloaderCounters::planner)
        .def_ro("transfers", &OffloaderCounters::transfers)
        .def_ro("stall_s", &OffloaderCounters::stall_s)
        .def_ro("iterations", &OffloaderCounters::iterations)
        .def_ro("iterations_dropped", &OffloaderCounters::iterations_dropped)
        .def_ro("score", &OffloaderCounters::score);
    nb::class_<IterationStats>(m, "IterationStats")
        .def_ro("stall_s", &IterationStats::stall_s)
        .def_ro("transfers", &IterationStats::transfers)
        .def_ro("score", &IterationStats::score)
        .def_ro("num_maps", &IterationStats::num_maps)
        .def_ro("total", &IterationStats::total)
        .def_ro("routing_checksum", &IterationStats::routing_checksum)
        .def_prop_ro(
            "rows",
            [](const IterationStats& stats) {
                std::vector<std::vector<int>> rows;
                for (const GateOutcome& row : stats.rows)
                    rows.push_back({row.hits, row.late, row.misses});
                return rows;
            },
            "[R][3]: hits, late, misses");
}

}  // namespace

void bind_offloader(nb::module_& m) {
    bind_counters(m);
    const auto release = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<PyOffloader>(m, "Offloader", "Planner, transfers and predictor of one device.")
        .def("__init__", &construct, "store"_a, "geometry"_a, nb::kw_only(), "num_slots"_a,
             "policy"_a, "eviction"_a, "prefetch_distance"_a, "store_capacity"_a,
             "embedding_size"_a, "chunk_bytes"_a, "prefetch_depth"_a, "link_gbps"_a.none(),
             "timeout_s"_a, "shard"_a, "num_shards"_a, "own_policy"_a.none(),
             "own_predictor"_a.none(), "cuda_device"_a.none(), nb::keep_alive<1, 16>(),
             nb::keep_alive<1, 17>())
        .def_prop_ro("arena", &arena)
        .def_prop_ro("arena_address",
                     [](PyOffloader& self) {
                         return reinterpret_cast<std::uintptr_t>(self->device().arena());
                     })
        .def_prop_ro("num_slots", [](PyOffloader& self) { return self->device().num_slots(); })
        .def_prop_ro("slot_stride_bytes",
                     [](PyOffloader& self) { return self->device().slot_stride_bytes(); })
        .def_prop_ro(
            "map_store", [](PyOffloader& self) { return self->map_store(); },
            nb::rv_policy::reference_internal, nb::sig("def map_store(self) -> MapStore | None"))
        .def(
            "borrow_maps",
            [](PyOffloader& self, double timeout_s) {
                {
                    const nb::gil_scoped_release released;
                    self->borrow_maps(timeout_s);
                }
                return self->map_store();
            },
            "timeout_s"_a, nb::rv_policy::reference_internal)
        .def(
            "return_maps", [](PyOffloader& self) { self->return_maps(); }, release)
        .def_prop_ro("wants_gates", [](PyOffloader& self) { return self->wants_gates(); })
        .def_prop_ro("wants_speculative",
                     [](PyOffloader& self) { return self->wants_speculative(); })
        .def_prop_ro("needs_speculative",
                     [](PyOffloader& self) { return self->needs_speculative(); })
        .def("begin_iteration", &begin_iteration, "requests"_a.noconvert(), "phases"_a.noconvert(),
             "token_ids"_a.noconvert(), "embeddings"_a.noconvert().none())
        .def("request", &request, "layer"_a, "chosen"_a.noconvert(), "row_of_token"_a.noconvert())
        .def("wait", &PyOffloader::wait)
        .def(
            "release",
            [](PyOffloader& self, const std::vector<int>& experts) {
                self.unlocked([&] { self->release(experts); });
            },
            "experts"_a)
        .def("publish_gate", &publish_gate, "layer"_a, "probs"_a.noconvert(),
             "chosen"_a.noconvert().none(), "speculative"_a.noconvert().none(), "num_experts"_a)
        .def("end_iteration",
             [](PyOffloader& self) { return self.unlocked([&] { return self->end_iteration(); }); })
        .def(
            "abort_iteration", [](PyOffloader& self) { self->abort_iteration(); }, release)
        .def(
            "request_ended",
            [](PyOffloader& self, std::uint64_t request) { self->request_ended(request); },
            "request"_a, release)
        .def(
            "wait_until_idle", [](PyOffloader& self) { self->wait_until_idle(); }, release)
        .def(
            "counters", [](PyOffloader& self) { return self->counters(); }, release)
        .def("resident",
             [](PyOffloader& self) {
                 std::vector<std::uint8_t> found = self.unlocked([&] { return self->resident(); });
                 const std::size_t size = found.size();
                 return to_numpy(std::move(found), {size});
             })
        .def(
            "check_integrity", [](PyOffloader& self) { self->check_integrity(); }, release)
        .def("close", [](PyOffloader& self) { self->close(); }, release);
}

}  // namespace fmoe::bindings
