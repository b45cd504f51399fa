"""The native device and gate server, driven as an engine drives them."""

import numpy as np
import pytest
import torch

from fmoe_ray.cache import Geometry, HostStore, Offloader
from fmoe_ray.engine.offloaded_experts import device_arena
from fmoe_ray.errors import EngineError
from fmoe_ray.gates import CudaGates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
GEOMETRY = Geometry(3, 6, 2)
BLOB = 3 << 20


def open_offloader(num_slots: int) -> Offloader:
    store = HostStore.create("", "test", 18, BLOB)
    for expert in range(18):
        store.blob(expert)[:] = expert + 1
    store.seal()
    return Offloader(store, GEOMETRY, num_slots, "lru", chunk_bytes=1 << 20, cuda_device=0)


def begin(offloader: Offloader, rows: int) -> None:
    offloader.begin_iteration(
        np.arange(rows, dtype=np.int64), np.ones(rows, np.uint8), np.zeros(rows, np.int32)
    )


def test_every_delivered_slot_holds_its_expert() -> None:
    with open_offloader(5) as offloader:
        arena = device_arena(offloader, torch.device("cuda", 0))
        generator = np.random.default_rng(0)
        for _ in range(20):
            begin(offloader, 1)
            for layer in range(3):
                chosen = generator.permutation(6)[None, :2].astype(np.int32)
                offloader.request(layer, chosen, np.zeros(1, np.int32))
                while delivered := offloader.wait():
                    for expert, slot in delivered:
                        assert (arena[slot, :BLOB] == layer * 6 + expert + 1).all()
            offloader.end_iteration()
        offloader.check_integrity()


def run_graph(gates: CudaGates, table: torch.Tensor, arena: torch.Tensor) -> torch.Tensor:
    """First bytes of what the table names for each layer's expert choices, read in the graph."""
    seen = torch.zeros(3, 6, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for layer in range(3):
            gates.enqueue(layer, torch.cuda.current_stream().cuda_stream)
            seen[layer] = arena[:, BLOB - 1][table[layer].clamp_min(0).long()]
    run_graph.graph = graph  # type: ignore[attr-defined]
    return seen


def test_a_graph_reads_what_it_asked_for() -> None:
    import ctypes

    with open_offloader(4) as offloader:
        arena = device_arena(offloader, torch.device("cuda", 0))
        table = torch.full((3, 6), -1, dtype=torch.int32, device="cuda")
        gates = CudaGates(
            offloader,
            GEOMETRY,
            max_rows=1,
            device=0,
            table_address=table.data_ptr(),
            timeout_s=5,
        )
        seen = run_graph(gates, table, arena)
        graph = run_graph.graph  # type: ignore[attr-defined]
        generator = np.random.default_rng(0)
        for _ in range(50):
            chosen = np.stack([generator.permutation(6)[:2] for _ in range(3)]).astype(np.int32)
            for layer in range(3):
                ctypes.memmove(gates.chosen_address(layer), chosen[layer].ctypes.data, 8)
            begin(offloader, 1)
            gates.begin_step(1)
            graph.replay()
            torch.cuda.synchronize()
            gates.end_step()
            offloader.end_iteration()
            for layer in range(3):
                for expert in chosen[layer]:
                    assert int(seen[layer, expert]) == layer * 6 + int(expert) + 1
        gates.close()


def test_a_step_that_is_never_launched_is_an_error_and_the_next_one_works() -> None:
    with open_offloader(4) as offloader:
        arena = device_arena(offloader, torch.device("cuda", 0))
        table = torch.full((3, 6), -1, dtype=torch.int32, device="cuda")
        gates = CudaGates(
            offloader, GEOMETRY, max_rows=1, device=0, table_address=table.data_ptr(), timeout_s=5
        )
        run_graph(gates, table, arena)
        begin(offloader, 1)
        gates.begin_step(1)
        with pytest.raises(EngineError, match="layer 0"):
            gates.end_step()
        offloader.abort_iteration()
        begin(offloader, 1)
        gates.begin_step(1)
        run_graph.graph.replay()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        gates.end_step()
        offloader.end_iteration()
        gates.close()
