"""Laws of the offloader as the engine sees it: what is delivered has the right bytes."""

import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ray.cache import Geometry, HostStore, IterationStats, Offloader
from fmoe_ray.errors import ConfigError, EngineError, StepTimeoutError
from fmoe_ray.policy import list_policies

NUM_LAYERS = 3
NUM_EXPERTS = 6
GEOMETRY = Geometry(NUM_LAYERS, NUM_EXPERTS, 2)
SIZE = NUM_LAYERS * NUM_EXPERTS
BLOB_BYTES = 3000
EMBEDDING_SIZE = 4
POLICIES = {info.name for info in list_policies()}


def make_store(blob_bytes: int = BLOB_BYTES) -> HostStore:
    store = HostStore.create("", "test", SIZE, blob_bytes)
    for index in range(SIZE):
        store.blob(index)[:] = np.random.default_rng(index).integers(
            0, 256, blob_bytes, dtype=np.uint8
        )
    store.seal()
    return store


@pytest.fixture(scope="module")
def store() -> Iterator[HostStore]:
    with make_store() as store:
        yield store


def begin(offloader: Offloader, num_rows: int = 1) -> None:
    offloader.begin_iteration(
        np.arange(num_rows, dtype=np.int64),
        np.ones(num_rows, dtype=np.uint8),
        np.zeros(num_rows, dtype=np.int32),
        np.ones((num_rows, EMBEDDING_SIZE), dtype=np.float32),
    )


def request(offloader: Offloader, layer: int, rows: list[list[int]]) -> None:
    """One token a row, which chooses these experts."""
    num_chosen = max(map(len, rows))
    chosen = np.full((len(rows), num_chosen), -1, dtype=np.int32)
    for row, experts in enumerate(rows):
        chosen[row, : len(experts)] = experts
    offloader.request(layer, chosen, np.arange(len(rows), dtype=np.int32))


def compute(offloader: Offloader, store: HostStore, layer: int) -> set[int]:
    """Takes what is delivered, checks its bytes, releases it."""
    computed: set[int] = set()
    while ready := offloader.wait():
        for expert, slot in ready:
            assert expert not in computed
            np.testing.assert_array_equal(
                offloader.arena[slot], store.blob(layer * NUM_EXPERTS + expert)
            )
            computed.add(expert)
        offloader.release([expert for expert, _ in ready])
    return computed


Row = st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=4)
Iteration = st.lists(
    st.lists(Row, min_size=2, max_size=2), min_size=NUM_LAYERS, max_size=NUM_LAYERS
)


def run_iteration(
    offloader: Offloader, store: HostStore, layers: list[list[list[int]]]
) -> IterationStats:
    begin(offloader, num_rows=2)
    for layer, rows in enumerate(layers):
        request(offloader, layer, rows)
        chosen = np.zeros((2, NUM_EXPERTS), dtype=np.uint8)
        for row, experts in enumerate(rows):
            chosen[row, experts] = 1
        probs = (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)
        offloader.publish_gate(layer, probs, chosen, speculative=probs)
        assert compute(offloader, store, layer) == {j for row in rows for j in row}
    return offloader.end_iteration()


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES - {"no-offload"})),
    num_slots=st.integers(1, SIZE),
    chunk_bytes=st.sampled_from([100, 1024, 4096]),
    iterations=st.lists(Iteration, min_size=1, max_size=6),
)
def test_delivered_slots_hold_the_bytes_of_their_blob_for_any_budget(
    policy: str, num_slots: int, chunk_bytes: int, iterations: list[list[list[list[int]]]]
) -> None:
    with (
        make_store() as store,
        Offloader(
            store,
            GEOMETRY,
            num_slots,
            policy,
            chunk_bytes=chunk_bytes,
            embedding_size=EMBEDDING_SIZE,
        ) as offloader,
    ):
        for layers in iterations:
            run_iteration(offloader, store, layers)
            offloader.check_integrity()
        offloader.end_request(0)
        offloader.wait_until_idle()
        counters = offloader.counters()
        moved = counters.bytes
        assert counters.on_demand_loads == counters.misses
        assert counters.copies + counters.prefetches_cancelled >= counters.misses
        assert moved.on_demand + moved.prefetched >= counters.copies * BLOB_BYTES
        assert moved.prefetched >= moved.prefetch_used + moved.prefetch_wasted
        if counters.prefetch_loads == 0:
            assert moved.on_demand == counters.misses * BLOB_BYTES


@settings(max_examples=60, deadline=None)
@given(num_slots=st.integers(NUM_EXPERTS, SIZE), iterations=st.lists(Iteration, max_size=6))
def test_hits_and_misses_are_those_of_a_plain_lru_list(
    num_slots: int, iterations: list[list[list[list[int]]]]
) -> None:
    resident: OrderedDict[int, None] = OrderedDict()
    with (
        make_store() as store,
        Offloader(store, GEOMETRY, num_slots, "lru") as offloader,
    ):
        for layers in iterations:
            hits = misses = 0
            rows_seen = np.zeros((2, 3), dtype=np.int64)
            for layer, rows in enumerate(layers):
                for row, experts in enumerate(rows):
                    for j in set(experts):
                        is_hit = layer * NUM_EXPERTS + j in resident
                        rows_seen[row, 0 if is_hit else 2] += 1
                needed = sorted({layer * NUM_EXPERTS + j for row in rows for j in row})
                hits += sum(expert in resident for expert in needed)
                misses += sum(expert not in resident for expert in needed)
                for expert in needed:
                    resident[expert] = None
                    resident.move_to_end(expert)
                while len(resident) > num_slots:
                    resident.popitem(last=False)
            stats = run_iteration(offloader, store, layers)
            assert (stats.hits, stats.late, stats.misses) == (hits, 0, misses)
            np.testing.assert_array_equal(stats.rows, rows_seen)


def test_everything_ready_is_delivered_by_one_call(store: HostStore) -> None:
    with Offloader(store, GEOMETRY, SIZE, "no-offload") as offloader:
        offloader.wait_until_idle()
        assert offloader.counters().prefetch_loads == SIZE
        begin(offloader)
        request(offloader, 1, [[4, 0, 3]])
        assert [expert for expert, _ in offloader.wait()] == [0, 3, 4]
        assert offloader.wait() == []
        stats = offloader.end_iteration()
        assert (stats.hits, stats.misses) == (3, 0)
        assert offloader.counters().bytes.prefetch_used == 3 * BLOB_BYTES


def test_a_layer_that_exceeds_the_slots_comes_in_waves(store: HostStore) -> None:
    with Offloader(store, GEOMETRY, 2, "lru") as offloader:
        begin(offloader)
        request(offloader, 0, [[0, 1, 2, 3, 4]])
        first = [offloader.wait()]
        while sum(map(len, first)) < 2:
            first.append(offloader.wait())
        with pytest.raises(ValueError, match="release what was computed"):
            offloader.wait()
        offloader.release([0, 1])
        assert compute(offloader, store, 0) == {2, 3, 4}
        offloader.end_iteration()


def test_foreign_and_impossible_experts_are_ignored(store: HostStore) -> None:
    with Offloader(store, GEOMETRY, 2, "lru", shard=1, num_shards=2) as offloader:
        begin(offloader)
        request(offloader, 0, [[-1, NUM_EXPERTS, 2, 3]])
        assert compute(offloader, store, 0) == {3}
        request(offloader, 1, [[0, 2]])
        assert offloader.wait() == []


def test_the_arena_keeps_its_address_and_is_aligned(store: HostStore) -> None:
    with Offloader(store, GEOMETRY, 3, "lru") as offloader:
        arena = offloader.arena
        assert arena.shape == (3, BLOB_BYTES) and arena.dtype == np.uint8
        assert arena.ctypes.data % 4096 == 0 and arena.strides[0] % 64 == 0
        run_iteration(offloader, store, [[[0], [1]]] * NUM_LAYERS)
        assert offloader.arena.ctypes.data == arena.ctypes.data
    assert arena[0].any(), "a view outlives close()"


def test_a_step_that_waits_too_long_says_for_what() -> None:
    blob_bytes = 2**20
    with (
        make_store(blob_bytes) as store,
        Offloader(store, GEOMETRY, 2, "lru", link_gbps=1e-4, timeout_s=0.05) as offloader,
    ):
        begin(offloader)
        request(offloader, 2, [[1, 4]])
        with pytest.raises(
            StepTimeoutError, match=r"layer 2 .* experts 1, 4; 2097152 bytes are outstanding"
        ):
            offloader.wait()
        offloader.abort_iteration()
        begin(offloader)
        offloader.check_integrity()


def test_close_with_copies_in_flight_ends_at_once_and_wakes_the_waiter() -> None:
    blob_bytes = 2**20
    with make_store(blob_bytes) as store:
        offloader = Offloader(store, GEOMETRY, 2, "lru", link_gbps=1e-4)
        begin(offloader)
        request(offloader, 0, [[1]])
        failures: list[Exception] = []

        def wait() -> None:
            try:
                offloader.wait()
            except EngineError as error:
                failures.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        offloader.close()
        waiter.join(timeout=20)
        assert len(failures) == 1 and "close()" in str(failures[0])
        with pytest.raises(EngineError, match="close"):
            offloader.end_iteration()
        offloader.close()


def test_an_offloader_keeps_its_store_mapped() -> None:
    store = make_store()
    expected = store.blob(5).copy()
    with Offloader(store, GEOMETRY, 2, "lru") as offloader:
        store.close()
        begin(offloader)
        request(offloader, 0, [[5]])
        ((_, slot),) = offloader.wait()
        np.testing.assert_array_equal(offloader.arena[slot], expected)


def test_calls_out_of_order_are_refused(store: HostStore) -> None:
    with Offloader(store, GEOMETRY, 4, "lru") as offloader:
        with pytest.raises(ValueError, match="begin one first"):
            offloader.wait()
        begin(offloader)
        with pytest.raises(ValueError, match="end or abort"):
            begin(offloader)
        with pytest.raises(ValueError, match="layer 3 of 3"):
            request(offloader, NUM_LAYERS, [[0]])
        with pytest.raises(ValueError, match="row 1 of 1"):
            request(offloader, 0, [[0], [1]])
        request(offloader, 0, [[0]])
        with pytest.raises(ValueError, match="not waited for"):
            request(offloader, 1, [[0]])
        with pytest.raises(ValueError, match="not waited for"):
            offloader.end_iteration()
        with pytest.raises(ValueError, match="not delivered"):
            offloader.release([1])


def test_arrays_of_another_type_or_shape_are_refused(store: HostStore) -> None:
    with Offloader(store, GEOMETRY, 4, "lru") as offloader:
        begin(offloader)
        with pytest.raises(TypeError):
            offloader.request(0, np.zeros((1, 2), np.int64), np.zeros(1, np.int32))
        with pytest.raises(ValueError, match="same number of tokens"):
            offloader.request(0, np.zeros((2, 2), np.int32), np.zeros(1, np.int32))
        with pytest.raises(ValueError, match="alike"):
            offloader.publish_gate(0, np.zeros((1, NUM_EXPERTS + 1), np.float32))
        with pytest.raises(ValueError, match="rows"):
            offloader.publish_gate(0, np.zeros((2, NUM_EXPERTS), np.float32))


def test_settings_that_do_not_fit_are_refused_by_name(store: HostStore) -> None:
    with pytest.raises(ConfigError, match=r"'best' is unknown; choose one of .*lru"):
        Offloader(store, GEOMETRY, 4, "best")
    with pytest.raises(ConfigError, match="no-offload keeps all 18 experts, got 4 slots"):
        Offloader(store, GEOMETRY, 4, "no-offload")
    with pytest.raises(ConfigError, match="18 blobs"):
        Offloader(store, Geometry(2, 2, 1), 2, "lru")
    with pytest.raises(ConfigError, match="eviction 'fifo'"):
        Offloader(store, GEOMETRY, 4, "lru", eviction="fifo")
    with pytest.raises(ConfigError, match="19 slots for 18 experts"):
        Offloader(store, GEOMETRY, 19, "lru")
    with HostStore.create("", "test", SIZE, 8) as empty, pytest.raises(ConfigError, match="sealed"):
        Offloader(empty, GEOMETRY, 4, "lru")


def test_every_listed_policy_can_be_made(store: HostStore) -> None:
    assert {"lru", "lfu", "ema", "no-offload"} <= POLICIES
    for policy in POLICIES:
        Offloader(store, GEOMETRY, SIZE, policy, embedding_size=EMBEDDING_SIZE).close()


@pytest.mark.parametrize(
    ("policy", "wants", "needs"),
    [
        ("lru", False, False),
        ("fmoe", False, False),
        ("fmoe+", True, False),
        ("speculate", True, True),
        ("mixtral-offloading", True, True),
    ],
)
def test_only_a_policy_made_of_the_speculative_gate_needs_it(
    policy: str, wants: bool, needs: bool, store: HostStore
) -> None:
    with Offloader(store, GEOMETRY, 4, policy, embedding_size=EMBEDDING_SIZE) as offloader:
        assert (offloader.wants_speculative, offloader.needs_speculative) == (wants, needs)
