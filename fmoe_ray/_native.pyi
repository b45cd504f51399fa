"""Native core of fmoe_ray."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Geometry:
    """Layers, experts per layer, experts per token."""

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

class Policy:
    """Decides on prefetches and victims."""

class Predictor:
    """Says which experts the next layers will ask for."""

def list_policies() -> list[str]:
    """Names that a policy can be asked for by."""

class HostStore:
    """Expert blobs in shared memory."""

    @staticmethod
    def create(name: str, fingerprint: str, num_blobs: int, blob_bytes: int, timeout_s: float) -> HostStore: ...

    @staticmethod
    def attach(name: str, fingerprint: str, timeout_s: float) -> HostStore: ...

    def blob(self, index: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', writable=False)]: ...

    def writable_blob(self, index: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]: ...

    def seal(self) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def num_blobs(self) -> int: ...

    @property
    def blob_bytes(self) -> int: ...

    @property
    def is_complete(self) -> bool: ...

class GateOutcome:
    @property
    def hits(self) -> int: ...

    @property
    def late(self) -> int: ...

    @property
    def misses(self) -> int: ...

class TransferCounters:
    @property
    def bytes_on_demand(self) -> int: ...

    @property
    def bytes_prefetched(self) -> int: ...

    @property
    def bytes_prefetch_used(self) -> int: ...

    @property
    def bytes_prefetch_wasted(self) -> int: ...

    @property
    def copies(self) -> int: ...

    @property
    def cancelled(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

class PlannerCounters:
    @property
    def hits(self) -> int: ...

    @property
    def late(self) -> int: ...

    @property
    def misses(self) -> int: ...

    @property
    def on_demand_loads(self) -> int: ...

    @property
    def prefetch_loads(self) -> int: ...

    @property
    def prefetches_used(self) -> int: ...

    @property
    def prefetches_wasted(self) -> int: ...

    @property
    def prefetches_cancelled(self) -> int: ...

    @property
    def evictions(self) -> int: ...

class OffloaderCounters:
    @property
    def planner(self) -> PlannerCounters: ...

    @property
    def transfers(self) -> TransferCounters: ...

    @property
    def stall_s(self) -> float: ...

    @property
    def iterations(self) -> int: ...

    @property
    def iterations_dropped(self) -> int: ...

class IterationStats:
    @property
    def stall_s(self) -> float: ...

    @property
    def transfers(self) -> TransferCounters: ...

    @property
    def total(self) -> GateOutcome: ...

    @property
    def rows(self) -> list[list[int]]:
        """[R][3]: hits, late, misses"""

class Offloader:
    """Planner, transfers and predictor of one device."""

    def __init__(self, store: HostStore, geometry: Geometry, *, num_slots: int, policy: str, eviction: str, prefetch_distance: int, store_capacity: int, embedding_size: int, chunk_bytes: int, prefetch_depth: int, link_gbps: float | None, timeout_s: float, shard: int, num_shards: int, own_policy: Policy | None, own_predictor: Predictor | None, cuda_device: int | None) -> None: ...

    @property
    def arena(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]: ...

    @property
    def arena_address(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_stride_bytes(self) -> int: ...

    @property
    def wants_gates(self) -> bool: ...

    @property
    def wants_speculative(self) -> bool: ...

    def begin_iteration(self, requests: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], phases: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], embeddings: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None) -> None: ...

    def request(self, layer: int, chosen: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], row_of_token: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def wait(self) -> list[tuple[int, int]]: ...

    def release(self, experts: Sequence[int]) -> None: ...

    def publish_gate(self, layer: int, probs: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], chosen: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, speculative: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, num_experts: int) -> None: ...

    def end_iteration(self) -> IterationStats: ...

    def abort_iteration(self) -> None: ...

    def request_ended(self, request: int) -> None: ...

    def wait_until_idle(self) -> None: ...

    def counters(self) -> OffloaderCounters: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...

class CudaGates:
    """Answers the gates of a step that runs as one graph."""

    def __init__(self, offloader: Offloader, geometry: Geometry, *, max_rows: int, device: int, table: int, timeout_s: float) -> None: ...

    def chosen_address(self, layer: int) -> int:
        """int32 [max_rows, K]"""

    def probs_address(self, layer: int) -> int:
        """float32 [max_rows, J]"""

    def enqueue(self, layer: int, stream: int) -> None: ...

    def begin_step(self, num_rows: int) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...

class TraceView:
    """
    A routing trace in the caller's arrays, which it keeps alive. Their shapes and ranges must have been checked.
    """

    def __init__(self, num_experts: int, expert_ids: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], weights: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], probs: Annotated[NDArray, dict(order='C', device='cpu', writable=False)] | None = None, spec_probs: Annotated[NDArray, dict(order='C', device='cpu', writable=False)] | None = None, embeddings: Annotated[NDArray, dict(order='C', device='cpu', writable=False)] | None = None, token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, phase: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

class RecallCount:
    @property
    def chosen(self) -> int: ...

    @property
    def within_top_k(self) -> int: ...

    @property
    def within_top_2k(self) -> int: ...

class SimulationResult:
    """Totals of everything run so far."""

    @property
    def num_steps(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def time(self) -> float: ...

    @property
    def compute(self) -> float: ...

    @property
    def stall(self) -> float: ...

    @property
    def hits(self) -> int: ...

    @property
    def late(self) -> int: ...

    @property
    def misses(self) -> int: ...

    @property
    def on_demand_loads(self) -> int: ...

    @property
    def prefetch_loads(self) -> int: ...

    @property
    def prefetches_used(self) -> int: ...

    @property
    def prefetches_wasted(self) -> int: ...

    @property
    def prefetches_cancelled(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def recall(self) -> list[RecallCount]:
        """Entry d - 1: of the predictions in force d layers before their layer."""

class ClairvoyantBounds:
    """Times of a whole run."""

    @property
    def belady(self) -> float: ...

    @property
    def clairvoyant(self) -> float: ...

    @property
    def lower_bound(self) -> float: ...

    @property
    def fewest_loads(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

def clairvoyant_bounds(trace: TraceView, sequences: Sequence[tuple[int, int]], num_slots: int, load_time: float, batch: int = 1) -> ClairvoyantBounds: ...

class Simulator:
    """One policy over one trace; see fmoe/simulator.h."""

    def __init__(self, trace: TraceView, policy: str, num_slots: int, load_time: float, *, batch: int = 1, eviction: str = 'policy', prefetch_distance: int = 3, store_capacity: int = 1000, prediction_delay: float = 0.0, prefetch_depth: int = 1) -> None: ...

    def warm_up(self, sequences: Sequence[tuple[int, int]]) -> None: ...

    def run(self, sequences: Sequence[tuple[int, int]]) -> None: ...

    def result(self) -> SimulationResult: ...

    def check_integrity(self) -> None: ...
