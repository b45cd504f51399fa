"""Expert blobs in shared memory, and the slots of one device that a policy fills from them.

The wrapper of the native host store and offloader. Knows neither torch nor models: an expert is an
index e = l * J + j and a blob of bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from fmoe_ray import _native
from fmoe_ray._native import Geometry
from fmoe_ray.errors import ConfigError, EngineError

__all__ = [
    "CacheCounters",
    "Geometry",
    "HostStore",
    "IterationStats",
    "Offloader",
    "TransferBytes",
    "available_memory_bytes",
]

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def available_memory_bytes() -> int:
    """What the kernel, and the limits of this process's groups, still give. Never from the total:
    some machines grow. Raises CapacityError where the kernel does not say.
    """
    return _native.available_memory_bytes()


class HostStore:
    """All experts of a model in shared memory, one page-aligned blob each.

    `create` fills it, or takes over a complete store of the same fingerprint and shape; other
    processes of the node `create` it too and share the pages. The last user to leave unlinks
    it; what a killed process leaves behind is taken over or rebuilt by the next `create`. The
    memory stays mapped while a view of a blob or an `Offloader` uses it.
    """

    def __init__(self, native: _native.HostStore) -> None:
        """Not called by users: see `create`."""
        self._native: _native.HostStore | None = native

    @classmethod
    def create(
        cls,
        name: str,
        fingerprint: str,
        num_blobs: int,
        blob_bytes: int,
        *,
        timeout_s: float = 900.0,
    ) -> Self:
        """Reserves `/dev/shm/<name>`; an empty name keeps it private to this process.

        Fill every blob and `seal()` unless `is_complete` already. Blocks up to `timeout_s` while
        another process fills it. Raises CapacityError before the first byte is written if it does
        not fit, FingerprintError if a live store of that name is another model's, StepTimeoutError,
        ConfigError for impossible arguments and for what another user has put in its place.
        """
        try:
            return cls(
                _native.HostStore.create(name, fingerprint, num_blobs, blob_bytes, timeout_s)
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def native(self) -> _native.HostStore:
        if self._native is None:
            raise EngineError("host store: used after close()")
        return self._native

    @property
    def name(self) -> str:
        return self.native.name

    @property
    def num_blobs(self) -> int:
        return self.native.num_blobs

    @property
    def blob_bytes(self) -> int:
        return self.native.blob_bytes

    @property
    def is_complete(self) -> bool:
        """Sealed: every blob is written and read-only."""
        return self.native.is_complete

    def blob(self, index: int) -> Bytes:
        """View uint8 [blob_bytes] of expert `index`; writable until `seal()`.

        A view taken before `seal()` must not be written after it. Raises ValueError out of range.
        """
        if self.is_complete:
            return self.native.blob(index)
        return self.native.writable_blob(index)

    def seal(self) -> None:
        """All blobs are written: other processes may map the store now."""
        self.native.seal()

    def share(self) -> "HostStore":
        """Another handle on the same memory, to be closed on its own."""
        return HostStore(self.native)

    def close(self) -> None:
        """Gives the store up; unmapped once no view and no offloader uses it. Idempotent."""
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferBytes:
    """Bytes moved over the link, by cause."""

    on_demand: int
    """A gate waited for them."""
    prefetched: int
    """Moved before a gate asked."""
    prefetch_used: int
    """Of the prefetched: an expert that a gate then asked for."""
    prefetch_wasted: int
    """Of the prefetched: evicted or cancelled before any gate asked."""

    @classmethod
    def of(cls, native: _native.TransferCounters) -> Self:
        return cls(
            on_demand=native.bytes_on_demand,
            prefetched=native.bytes_prefetched,
            prefetch_used=native.bytes_prefetch_used,
            prefetch_wasted=native.bytes_prefetch_wasted,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationStats:
    """Of one iteration. hit: ready when the gate asked; late: requested, not ready; miss: not."""

    stall_s: float
    """Seconds that `wait()` blocked."""
    bytes: TransferBytes
    """Since the iteration before ended."""
    hits: int
    late: int
    misses: int
    num_predictions: int
    """Predictions posted since then, one a row and layer; 0 where the policy predicts nothing."""
    prediction_score: float
    """Sum of their similarities; 1 each where the policy compares nothing."""
    num_maps: int
    """Expert maps that the predictor keeps."""
    rows: npt.NDArray[np.int64]
    """[R, 3] hits, late, misses; an expert counts once for each row that chose it."""
    routing_checksum: int
    """Of what the gates chose, experts of other shards included: equal on all shards of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCounters:
    """Since the offloader was made."""

    iterations: int
    iterations_dropped: int
    """Not shown to the predictor, because it was behind."""
    stall_s: float
    bytes: TransferBytes
    hits: int
    late: int
    misses: int
    on_demand_loads: int
    prefetch_loads: int
    prefetches_used: int
    prefetches_wasted: int
    prefetches_cancelled: int
    evictions: int
    copies: int
    num_predictions: int
    prediction_score: float
    preemptions: int
    """Times that an on-demand load overtook a prefetch that had begun."""


class Offloader:
    """The expert slots of one device, filled by a policy.

    One thread makes all calls, per iteration in this order: `begin_iteration`; per layer `request`,
    `publish_gate`, `wait` and `release` until `wait` returns []; `end_iteration`. After a failed
    step `abort_iteration`. A failure of its own threads reaches the next call as EngineError.
    """

    def __init__(
        self,
        store: HostStore,
        geometry: Geometry,
        num_slots: int,
        policy: str,
        *,
        eviction: str = "policy",
        prefetch_distance: int = 3,
        store_capacity: int = 1000,
        embedding_size: int = 0,
        chunk_bytes: int = 4 * 2**20,
        prefetch_depth: int = 2,
        link_gbps: float | None = None,
        timeout_s: float = 60.0,
        shard: int = 0,
        num_shards: int = 1,
        policy_object: _native.Policy | None = None,
        predictor_object: _native.Predictor | None = None,
        cuda_device: int | None = None,
    ) -> None:
        """`num_slots` experts fit at once. `policy_object` replaces the named policy, and
        `predictor_object` is then what it listens to. `embedding_size` is h, 0 where no embeddings
        are published. Of `num_shards`, this one serves experts e with e mod num_shards == shard.

        `cuda_device` is the ordinal of the GPU that holds the slots; None: they lie in host memory.

        Raises ConfigError for settings that do not fit, CapacityError if memory does not suffice,
        EngineError if the GPU cannot be used.
        """
        self._cuda_device = cuda_device
        self._num_experts = geometry.num_experts
        if predictor_object is not None and policy_object is None:
            raise ConfigError("predictor_object needs the policy_object that listens to it")
        try:
            self._native = _native.Offloader(
                store.native,
                geometry,
                num_slots=num_slots,
                policy=policy,
                eviction=eviction,
                prefetch_distance=prefetch_distance,
                store_capacity=store_capacity,
                embedding_size=embedding_size,
                chunk_bytes=chunk_bytes,
                prefetch_depth=prefetch_depth,
                link_gbps=link_gbps,
                timeout_s=timeout_s,
                shard=shard,
                num_shards=num_shards,
                own_policy=policy_object,
                own_predictor=predictor_object,
                cuda_device=cuda_device,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def native(self) -> _native.Offloader:
        return self._native

    @property
    def arena(self) -> Bytes:
        """uint8 [num_slots, blob_bytes]; one address for life, rows 64-byte aligned. Of slots in
        host memory only."""
        assert self._cuda_device is None, "these slots lie on a GPU: see arena_address"
        return self._native.arena

    @property
    def arena_address(self) -> int:
        """Of slot 0, on the device; slot s lies `s * slot_stride_bytes` behind."""
        return self._native.arena_address

    @property
    def num_slots(self) -> int:
        return self._native.num_slots

    @property
    def slot_stride_bytes(self) -> int:
        return self._native.slot_stride_bytes

    @property
    def map_store(self) -> _native.MapStore | None:
        """The expert maps that the predictor learns into; None where it keeps none.

        Only before the first iteration and after `close`: in between they are the matcher's, and
        `borrow_maps` lends them.
        """
        return self._native.map_store

    @contextmanager
    def borrow_maps(self, timeout_s: float) -> Iterator[_native.MapStore]:
        """Lends the maps, between two iterations, to a thread that is not the inference thread.

        Searches wait meanwhile, inference does not: keep it short. One borrower at a time. Raises
        StepTimeoutError if the iteration in progress does not end in time, EngineError after
        `close`, ValueError where the policy keeps no maps.
        """
        maps = self._native.borrow_maps(timeout_s)
        try:
            yield maps
        finally:
            self._native.return_maps()

    @property
    def wants_gates(self) -> bool:
        """False: nobody listens to `publish_gate`, so it need not be called."""
        return self._native.wants_gates

    @property
    def wants_speculative(self) -> bool:
        """True: `publish_gate` should be given the speculative gate."""
        return self._native.wants_speculative

    @property
    def needs_speculative(self) -> bool:
        """True: without it the predictor says nothing."""
        return self._native.needs_speculative

    def begin_iteration(
        self,
        requests: npt.NDArray[np.int64],
        phases: Bytes,
        token_ids: Ints,
        embeddings: Floats | None = None,
    ) -> None:
        """Publishes the context of R rows.

        requests int64 [R] numbers of the requests; phases uint8 [R], 0 prefill, 1 decode; token_ids
        int32 [R] input token, -1 where there is none or many; embeddings float32 [R, h] or None.
        Raises ValueError while an iteration is in progress.
        """
        self._native.begin_iteration(requests, phases, token_ids, embeddings)

    def request(self, layer: int, chosen: Ints, row_of_token: Ints) -> None:
        """The gate's choice; starts loading what is missing. Does not block.

        chosen int32 [T, K] experts of the layer, those outside 0..J-1 or of another shard are
        ignored; row_of_token int32 [T]. Raises ValueError before the experts of the previous
        request were all delivered.
        """
        self._native.request(layer, chosen, row_of_token)

    def wait(self) -> list[tuple[int, int]]:
        """(expert, slot) of chosen experts that can be computed now; [] when all were delivered.

        Blocks, without the GIL, until there is at least one. A slot keeps its expert until
        `release` or the next `request`. Raises StepTimeoutError after `timeout_s`, ValueError if
        the chosen experts exceed the slots and every slot waits to be released.
        """
        return self._native.wait()

    def release(self, experts: Sequence[int]) -> None:
        """Experts of the layer whose computation is over; their slots may be overwritten."""
        self._native.release(experts)

    def publish_gate(
        self,
        layer: int,
        probs: Floats,
        chosen: Bytes | None = None,
        speculative: Floats | None = None,
    ) -> None:
        """Shows the predictor a gate. Never blocks, except for synchronous baselines.

        probs float32 [R, J] distribution, the mean over a prefill's tokens; chosen uint8 [R, J], 1
        where a token of the row chose the expert; speculative float32 [R, J] the next layer's gate
        on this layer's hidden state.
        """
        self._native.publish_gate(layer, probs, chosen, speculative, self._num_experts)

    def end_iteration(self) -> IterationStats:
        stats = self._native.end_iteration()
        return IterationStats(
            stall_s=stats.stall_s,
            bytes=TransferBytes.of(stats.transfers),
            hits=stats.total.hits,
            late=stats.total.late,
            misses=stats.total.misses,
            num_predictions=stats.score.count,
            prediction_score=stats.score.sum,
            num_maps=stats.num_maps,
            rows=np.array(stats.rows, dtype=np.int64),
            routing_checksum=stats.routing_checksum,
        )

    def abort_iteration(self) -> None:
        """After a failed step: what it waited for is given up and nothing is learnt from it."""
        self._native.abort_iteration()

    def end_request(self, request: int) -> None:
        """Policy and predictor forget, or learn from, what they kept of the request."""
        self._native.request_ended(request)

    def wait_until_idle(self) -> None:
        """Blocks until no copy is queued or in flight. Raises StepTimeoutError."""
        self._native.wait_until_idle()

    def counters(self) -> CacheCounters:
        counters = self._native.counters()
        planner = counters.planner
        return CacheCounters(
            iterations=counters.iterations,
            iterations_dropped=counters.iterations_dropped,
            stall_s=counters.stall_s,
            bytes=TransferBytes.of(counters.transfers),
            hits=planner.hits,
            late=planner.late,
            misses=planner.misses,
            on_demand_loads=planner.on_demand_loads,
            prefetch_loads=planner.prefetch_loads,
            prefetches_used=planner.prefetches_used,
            prefetches_wasted=planner.prefetches_wasted,
            prefetches_cancelled=planner.prefetches_cancelled,
            evictions=planner.evictions,
            copies=counters.transfers.copies,
            num_predictions=counters.score.count,
            prediction_score=counters.score.sum,
            preemptions=counters.transfers.preemptions,
        )

    def resident(self) -> npt.NDArray[np.bool_]:
        """[L * J]: which experts lie ready in a slot."""
        return np.asarray(self._native.resident()).astype(np.bool_)

    def check_integrity(self) -> None:
        """Raises EngineError where the books of cache, planner and transfers disagree."""
        self._native.check_integrity()

    def close(self) -> None:
        """Ends its threads, also with copies in flight; idempotent. Slots in host memory stay
        mapped, those on a GPU are freed.
        """
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
