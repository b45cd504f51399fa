"""Native core of fmoe_ray."""

from collections.abc import Sequence
import enum
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

class EntryRef:
    """An entry at a moment in time."""

    @property
    def index(self) -> int: ...

    @property
    def generation(self) -> int: ...

class MapStore:
    """Wrapped by fmoe_ray.maps.store."""

    def __init__(self, geometry: Geometry, capacity: int, embedding_size: int, prefetch_distance: int) -> None: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def capacity(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def embedding_size(self) -> int: ...

    @property
    def prefetch_distance(self) -> int: ...

    @property
    def map_bytes(self) -> int: ...

    @property
    def embedding_bytes(self) -> int: ...

    def insert(self, probs: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], embeddings: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None, chosen: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu', writable=False)] | None, token_ids: Annotated[NDArray[numpy.int32], dict(order='C', device='cpu', writable=False)] | None, predecessors: Sequence[EntryRef], is_unit: bool) -> list[EntryRef]: ...

    def redundancy(self, semantic_score: float, map_score: float) -> float: ...

    def link(self, previous: EntryRef, next: EntryRef) -> None: ...

    def is_current(self, ref: EntryRef) -> bool: ...

    def ref(self, entry: int) -> EntryRef: ...

    def predecessors(self) -> NDArray[numpy.int32]:
        """[N] index of each entry's predecessor, -1 where there is none."""

    def successors(self) -> NDArray[numpy.int32]: ...

    def token_ids(self) -> NDArray[numpy.int32]: ...

    def read_probs(self, first: int, count: int) -> NDArray[numpy.uint16]:
        """[count, L, J] bits of half-precision numbers."""

    def read_embeddings(self, first: int, count: int) -> NDArray[numpy.float32]: ...

    def read_chosen(self, first: int, count: int) -> NDArray[numpy.uint8]: ...

    def semantic_scores(self, embedding: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]: ...

    def map_scores(self, probs: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]: ...

    def check_integrity(self) -> None: ...

class Match:
    """A stored map and its similarity; entry -1: nothing resembles."""

    @property
    def entry(self) -> int: ...

    @property
    def score(self) -> float: ...

class Matcher:
    """Wrapped by fmoe_ray.maps.matcher."""

    def __init__(self, store: MapStore, num_columns: int) -> None: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_observed(self) -> int: ...

    def start(self, num_rows: int, embeddings: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None) -> None: ...

    def observe(self, layer: int, probs: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> None: ...

    def best_semantic(self, row: int) -> Match: ...

    def best_trajectory(self, row: int) -> Match: ...

    def nearest_semantic(self, row: int, n: int) -> list[Match]: ...

    def nearest_trajectory(self, row: int, n: int) -> list[Match]: ...

    def semantic_scores(self) -> NDArray[numpy.float32]: ...

    def trajectory_scores(self) -> NDArray[numpy.float32]: ...

    def vote(self, neighbours: Sequence[Match], sharpness: float, on_chosen: bool, first_layer: int, num_layers: int) -> NDArray[numpy.float32]: ...

class Cause(enum.Enum):
    on_demand = 0

    prefetch = 1

class IterationStarted:
    @property
    def iteration(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def has_prefill(self) -> bool: ...

    @property
    def layer_time(self) -> float: ...

    @property
    def load_time(self) -> float: ...

class GateRequested:
    @property
    def layer(self) -> int: ...

    @property
    def needed(self) -> list[int]: ...

    @property
    def backlog(self) -> float: ...

class VictimNeeded:
    @property
    def expert(self) -> int: ...

    @property
    def cause(self) -> Cause: ...

    @property
    def layer(self) -> int: ...

class Instruction:
    """What a policy orders."""

    class Kind(enum.Enum):
        start_copy = 0

        cancel = 1

        hold = 2

    @staticmethod
    def start_copy(expert: int, victim: int = -1) -> Instruction: ...

    @staticmethod
    def cancel(expert: int) -> Instruction: ...

    @staticmethod
    def hold(layer: int, expert: int) -> Instruction: ...

    @property
    def kind(self) -> Instruction.Kind: ...

    @property
    def expert(self) -> int: ...

    @property
    def victim(self) -> int: ...

    @property
    def layer(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

class Prediction:
    """p of experts in layers from first_layer on; score 1 where not given."""

    def __init__(self, iteration: int, observed_layer: int, first_layer: int, p: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], score: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None = None, is_next_iteration: bool = False) -> None: ...

    @property
    def iteration(self) -> int: ...

    @property
    def observed_layer(self) -> int: ...

    @property
    def is_next_iteration(self) -> bool: ...

    @property
    def first_layer(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def p(self) -> NDArray[numpy.float32]: ...

    @property
    def score(self) -> NDArray[numpy.float32]: ...

class Predictor:
    """A predictor made by make_policy, for experiments."""

    def iteration_started(self, iteration: int, requests: Sequence[int], embeddings: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None = None, token_ids: Sequence[int] | None = None) -> list[Prediction]: ...

    def gate_observed(self, layer: int, probs: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], chosen: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu', writable=False)] | None = None, speculative: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None = None) -> list[Prediction]: ...

    def iteration_ended(self) -> list[Prediction]: ...

    def request_ended(self, request: int) -> None: ...

    @property
    def is_synchronous(self) -> bool: ...

    @property
    def store(self) -> MapStore:
        """Its MapStore, or None."""

class PolicyInfo:
    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def predictor(self) -> str: ...

def describe_policies() -> list[PolicyInfo]: ...

class PolicyParts:
    """A policy and the predictor that it listens to."""

    @property
    def predictor(self) -> Predictor:
        """None where the policy needs none."""

def make_policy(name: str, geometry: Geometry, num_slots: int, prefetch_distance: int, store_capacity: int, embedding_size: int, eviction: str, shard: int, num_shards: int) -> PolicyParts: ...

def select_prefetch(p: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], score: float, top_k: int) -> list[int]:
    """E_prefetch of one layer and row (paper 4.3)."""

def prefetch_threshold(score: float) -> float:
    """delta (paper 4.3)."""

class IterationContext:
    """What is known before the first layer; arrays are copies."""

    @property
    def iteration(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def requests(self) -> list[int]: ...

    @property
    def is_prefill(self) -> list[bool]: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def embeddings(self) -> NDArray[numpy.float32] | None:
        """[R, h], or None."""

def plugin_policy(geometry: Geometry, policy: object, predictor: object | None) -> PolicyParts:
    """
    Parts that ask objects with the methods of fmoe_ray.policy.Policy and Predictor.
    """

class ExpertCache:
    """Which expert lies in which slot; read-only."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def residents(self) -> list[int]: ...

    def is_absent(self, expert: int) -> bool: ...

    def is_ready(self, expert: int) -> bool: ...

    def is_loading(self, expert: int) -> bool: ...

    def is_pinned(self, expert: int) -> bool: ...

    def can_evict(self, expert: int) -> bool: ...

    def is_unused_prefetch(self, expert: int) -> bool: ...

    def slot(self, expert: int) -> int: ...

    def frequency(self, expert: int) -> int: ...

    def last_use(self, expert: int) -> int: ...

class LinkCommand:
    """An order to the link."""

    class Kind(enum.Enum):
        start = 0

        promote = 1

        cancel = 2

    @property
    def kind(self) -> LinkCommand.Kind: ...

    @property
    def expert(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def cause(self) -> Cause: ...

class GateOutcome:
    @property
    def hits(self) -> int: ...

    @property
    def late(self) -> int: ...

    @property
    def misses(self) -> int: ...

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

class Planner:
    """Wrapped by fmoe_ray.policy.planner."""

    def __init__(self, geometry: Geometry, num_slots: int, parts: PolicyParts, prefetch_depth: int) -> None: ...

    @property
    def cache(self) -> ExpertCache: ...

    @property
    def counters(self) -> PlannerCounters: ...

    def iteration_started(self, iteration: int, num_rows: int, has_prefill: bool, layer_time: float, load_time: float) -> None: ...

    def gate_requested(self, layer: int, needed: Sequence[int], backlog: float) -> GateOutcome: ...

    def predicted(self, prediction: Prediction) -> None: ...

    def copy_done(self, expert: int) -> None: ...

    def release(self, expert: int) -> None: ...

    def release_all(self) -> None: ...

    def iteration_ended(self) -> None: ...

    def request_ended(self, request: int) -> None: ...

    @property
    def is_held(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    def take_commands(self) -> list[LinkCommand]: ...

    def check_integrity(self) -> None: ...

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
