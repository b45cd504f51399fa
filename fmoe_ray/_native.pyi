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

def clairvoyant_bounds(trace: TraceView, sequences: Sequence[tuple[int, int]], num_slots: int, load_time: float, batch: int = 1) -> ClairvoyantBounds: ...

class Simulator:
    """One policy over one trace; see fmoe/simulator.h."""

    def __init__(self, trace: TraceView, policy: str, num_slots: int, load_time: float, *, batch: int = 1, prefetch_distance: int = 3, store_capacity: int = 1000, prediction_delay: float = 0.0, prefetch_depth: int = 1) -> None: ...

    def warm_up(self, sequences: Sequence[tuple[int, int]]) -> None: ...

    def run(self, sequences: Sequence[tuple[int, int]]) -> None: ...

    def result(self) -> SimulationResult: ...

    def check_integrity(self) -> None: ...
