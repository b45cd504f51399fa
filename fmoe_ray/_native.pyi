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

    def generations(self) -> NDArray[numpy.uint32]:
        """[N] moves on with every replacement of an entry."""

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

class IterationContext:
    """What is known before the first layer. R rows."""

    def __init__(self, iteration: int, requests: Sequence[int], embeddings: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None = None, token_ids: Sequence[int] | None = None, is_prefill: Sequence[bool] | None = None) -> None: ...

    @property
    def iteration(self) -> int: ...

    @property
    def requests(self) -> list[int]: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def is_prefill(self) -> list[bool]: ...

    @property
    def embeddings(self) -> NDArray[numpy.float32] | None:
        """[R, h], or None."""

class GateObservation:
    """One layer's gate, seen by every row; arrays [R, J]."""

    def __init__(self, layer: int, probs: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], chosen: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu', writable=False)] | None = None, speculative: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None = None) -> None: ...

    @property
    def layer(self) -> int: ...

    @property
    def probs(self) -> NDArray[numpy.float32]: ...

    @property
    def chosen(self) -> NDArray[numpy.uint8] | None:
        """1 where a token of the row chose the expert, or None."""

    @property
    def speculative(self) -> NDArray[numpy.float32] | None:
        """Gate layer + 1 on this layer's hidden state, or None."""

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

    def __repr__(self) -> str: ...

class Prediction:
    """
    p [R, num_layers, J] of the layers from first_layer on; score [R, num_layers], 1 where not given.
    """

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
    def later(self) -> NDArray[numpy.float32]: ...

    @property
    def score(self) -> NDArray[numpy.float32]: ...

class Policy:
    """
    The decisions: events in, instructions out. Subclass it for an experiment; only victim() must be written. Events and cache are lent for the call.
    """

    def __init__(self) -> None: ...

    def iteration_started(self, event: IterationStarted, cache: ExpertCache) -> list[Instruction]: ...

    def gate_requested(self, event: GateRequested, cache: ExpertCache) -> list[Instruction]:
        """Called before the misses among event.needed are served."""

    def predicted(self, prediction: Prediction, cache: ExpertCache) -> list[Instruction]: ...

    def copy_done(self, expert: int, cache: ExpertCache) -> list[Instruction]: ...

    def iteration_ended(self, cache: ExpertCache) -> list[Instruction]: ...

    def request_ended(self, request: int, cache: ExpertCache) -> list[Instruction]: ...

    def link_free(self, cache: ExpertCache) -> list[Instruction]:
        """
        The link can take one more prefetch: at most one Instruction.start_copy.
        """

    def victim(self, needed: VictimNeeded, cache: ExpertCache) -> int:
        """An expert with cache.can_evict, or -1 where there is none."""

class Predictor:
    """
    Says which experts the next layers will ask for. Subclass it for an experiment.
    """

    def __init__(self, geometry: Geometry) -> None: ...

    def iteration_started(self, context: IterationContext) -> list[Prediction]: ...

    def gate_observed(self, gate: GateObservation) -> list[Prediction]: ...

    def iteration_ended(self) -> list[Prediction]:
        """All gates were seen: learn from them."""

    def request_ended(self, request: int) -> None: ...

    def is_synchronous(self) -> bool:
        """True: inference waits for the prediction."""

    def wants_speculative(self) -> bool:
        """True: it reads the speculative gate, which is computed for it alone."""

    def clone(self) -> Predictor | None:
        """
        One that has learnt the same and goes its own way from here; None where it cannot be copied.
        """

    def store(self) -> MapStore | None:
        """The native MapStore that it learns into."""

class PolicyInfo:
    """One line of the table of policies."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def predictor(self) -> str: ...

    @property
    def parameters(self) -> list[str]:
        """Settings that have an effect on it."""

def describe_policies() -> list[PolicyInfo]: ...

class PolicyParts:
    """A policy and the predictor that it listens to."""

    @property
    def policy(self) -> Policy: ...

    @property
    def predictor(self) -> Predictor | None:
        """None where the policy needs none."""

def make_policy(name: str, geometry: Geometry, num_slots: int, prefetch_distance: int, store_capacity: int, embedding_size: int, eviction: str, shard: int, num_shards: int) -> PolicyParts: ...

def select_prefetch(p: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], score: float, top_k: int) -> list[int]:
    """E_prefetch of one layer and row (paper 4.3)."""

def prefetch_threshold(score: float) -> float:
    """delta (paper 4.3)."""

class HostStore:
    """Expert blobs in shared memory."""

    @staticmethod
    def create(name: str, fingerprint: str, num_blobs: int, blob_bytes: int, timeout_s: float) -> HostStore: ...

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

def available_memory_bytes() -> int: ...

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

class PredictionScore:
    @property
    def count(self) -> int: ...

    @property
    def sum(self) -> float: ...

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

    @property
    def score(self) -> PredictionScore: ...

class IterationStats:
    @property
    def stall_s(self) -> float: ...

    @property
    def transfers(self) -> TransferCounters: ...

    @property
    def score(self) -> PredictionScore: ...

    @property
    def num_maps(self) -> int: ...

    @property
    def total(self) -> GateOutcome: ...

    @property
    def routing_checksum(self) -> int: ...

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
    def map_store(self) -> MapStore | None: ...

    def borrow_maps(self, timeout_s: float) -> MapStore: ...

    def return_maps(self) -> None: ...

    @property
    def wants_gates(self) -> bool: ...

    @property
    def wants_speculative(self) -> bool: ...

    @property
    def needs_speculative(self) -> bool: ...

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

    def resident(self) -> NDArray[numpy.uint8]: ...

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

class Planner:
    """Wrapped by fmoe_ray.policy.planner."""

    def __init__(self, geometry: Geometry, num_slots: int, policy: Policy, prefetch_depth: int) -> None: ...

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
    def decode_tokens(self) -> int: ...

    @property
    def decode_time(self) -> float: ...

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
    def perfect_prefetch(self) -> float: ...

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

    def __init__(self, trace: TraceView, policy: str, num_slots: int, load_time: float, *, batch: int = 1, eviction: str = 'policy', prefetch_distance: int = 3, store_capacity: int = 1000, prediction_delay: float = 0.0, prefetch_depth: int = 1, own_policy: Policy | None = None, own_predictor: Predictor | None = None) -> None: ...

    def warm_up(self, sequences: Sequence[tuple[int, int]]) -> None: ...

    def run(self, sequences: Sequence[tuple[int, int]]) -> None: ...

    @property
    def can_clone_predictor(self) -> bool: ...

    def clone_predictor(self) -> Predictor | None:
        """As the predictor is now; None unless can_clone_predictor."""

    def result(self) -> SimulationResult: ...

    def check_integrity(self) -> None: ...
