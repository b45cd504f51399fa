"""The native simulator against a plain one that counts time in ticks, and its laws."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.simulator import Simulation, TraceSimulator
from fmoe_ray.trace.format import RoutingTrace

Gate = tuple[int, ...]
NEVER = 10**9


def make_trace(
    num_tokens: int, num_layers: int, num_experts: int, top_k: int, lengths: list[int], seed: int
) -> RoutingTrace:
    """Experts by a falling preference, so that caching pays a little."""
    rng = np.random.default_rng(seed)
    preference = rng.gumbel(size=(num_tokens, num_layers, num_experts)) - np.arange(num_experts)
    seq_len = np.array(lengths, np.int64)
    return RoutingTrace(
        expert_ids=np.argsort(-preference, axis=-1)[..., :top_k],
        weights=rng.random((num_tokens, num_layers, top_k)).astype(np.float32),
        seq_start=np.cumsum(seq_len) - seq_len,
        seq_len=seq_len,
        num_experts=num_experts,
        token_ids=rng.integers(0, 4, num_tokens).astype(np.int32),
    )


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    num_experts = draw(st.integers(2, 6))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return make_trace(
        sum(lengths),
        draw(st.integers(1, 4)),
        num_experts,
        draw(st.integers(1, min(2, num_experts))),
        lengths,
        draw(st.integers(0, 2**32 - 1)),
    )


def gates_of(trace: RoutingTrace, batch: int) -> list[Gate]:
    """The experts that each gate needs, in order; a row that ends takes the next sequence."""
    waiting = [list(range(start, start + length)) for start, length in trace.sequences()]
    rows: list[list[int]] = []
    gates: list[Gate] = []
    while True:
        rows = [row for row in rows if row]
        ended = batch - len(rows)
        rows += waiting[:ended]
        waiting = waiting[ended:]
        if not rows:
            return gates
        tokens = [row.pop(0) for row in rows]
        for layer in range(trace.num_layers):
            chosen = trace.expert_ids[tokens, layer].ravel()
            gates.append(tuple(sorted({layer * trace.num_experts + int(j) for j in chosen})))


@dataclass
class Plain:
    """One gate after the other, one tick after the other: `compute` ticks a layer, `load` ticks an
    expert. Counts like the native simulator."""

    gates: list[Gate]
    num_layers: int
    slots: int
    load: int
    compute: int
    ready: set[int] = field(default_factory=set)
    used_at: dict[int, int] = field(default_factory=dict)
    uses: int = 0
    prefetch: tuple[int, int] | None = None
    """(expert, ticks it still takes)"""
    position: int = -1
    stall: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    prefetches: int = 0

    def next_use(self, expert: int) -> int:
        ahead = range(self.position + 1, len(self.gates))
        return next((gate for gate in ahead if expert in self.gates[gate]), NEVER)

    def farthest(self, candidates: set[int]) -> int:
        return min(candidates, key=lambda expert: (-self.next_use(expert), expert))

    def oldest(self, candidates: set[int]) -> int:
        return min(candidates, key=lambda expert: self.used_at[expert])

    def use(self, expert: int) -> None:
        self.uses += 1
        self.used_at[expert] = self.uses

    def choose_prefetch(self, pinned: set[int]) -> None:
        """What the nearest gate within an iteration needs, unless its victim is needed sooner."""
        for gate in range(self.position + 1, self.position + 1 + self.num_layers):
            for expert in self.gates[gate] if gate < len(self.gates) else ():
                if expert in self.ready:
                    continue
                if len(self.ready) == self.slots:
                    if not self.ready - pinned:
                        return
                    victim = self.farthest(self.ready - pinned)
                    if self.next_use(victim) <= gate:
                        return
                    self.ready.remove(victim)
                self.prefetch = (expert, self.load)
                self.prefetches += 1
                return

    def load_missing(self, needed: Gate, victim_of: Callable[[set[int]], int]) -> None:
        loads = []
        absent = []
        for expert in needed:
            if expert in self.ready:
                self.hits += 1
            elif self.prefetch is not None and self.prefetch[0] == expert:
                self.late += 1
                self.stall += self.prefetch[1]
                loads.append(expert)
                self.prefetch = None
            else:
                self.misses += 1
                self.stall += self.load
                absent.append(expert)
            self.use(expert)
        self.ready.update(loads)
        for expert in absent:
            if len(self.ready) + (self.prefetch is not None) == self.slots:
                candidates = self.ready - set(needed)
                if candidates:
                    self.ready.remove(victim_of(candidates))
                else:
                    self.prefetch = None  # the slot is needed now
            self.ready.add(expert)
        for expert in [*loads, *absent]:
            self.use(expert)

    def advance_prefetch(self) -> None:
        assert self.prefetch is not None
        expert, left = self.prefetch
        self.prefetch = (expert, left - 1)
        if left == 1:
            self.prefetch = None
            self.ready.add(expert)
            self.use(expert)

    def run(self, *, is_lru: bool, prefetches: bool) -> "Plain":
        for position, needed in enumerate(self.gates):
            self.position = position
            self.load_missing(needed, self.oldest if is_lru else self.farthest)
            for _ in range(self.compute):
                if prefetches and self.prefetch is None:
                    self.choose_prefetch(set(needed))
                if self.prefetch is not None:
                    self.advance_prefetch()
            if prefetches and self.prefetch is None:
                self.choose_prefetch(set(needed))
            is_iteration_end = (position + 1) % self.num_layers == 0
            if prefetches and self.prefetch is None and is_iteration_end:
                self.choose_prefetch(set())
        return self

    @property
    def time(self) -> float:
        return len(self.gates) + self.stall / self.compute


ticks = st.tuples(st.integers(0, 5), st.integers(1, 3))


@given(trace=traces(), slots=st.integers(1, 24), ticks=ticks, batch=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_lru_agrees_with_a_plain_simulation(
    trace: RoutingTrace, slots: int, ticks: tuple[int, int], batch: int
) -> None:
    gates = gates_of(trace, batch)
    slots = min(max(slots, max(map(len, gates))), trace.num_layers * trace.num_experts)
    load, compute = ticks
    plain = Plain(gates, trace.num_layers, slots, load, compute).run(is_lru=True, prefetches=False)
    native = TraceSimulator(trace).run(
        "lru", trace.sequences(), slots=slots, load_ratio=load / compute, batch=batch
    )
    assert (native.hits, native.late, native.misses) == (plain.hits, 0, plain.misses)
    assert native.stall == pytest.approx(plain.stall / compute)
    assert native.num_steps * trace.num_layers == len(gates)
    assert native.num_tokens == trace.seq_len.sum()


@given(trace=traces(), slots=st.integers(1, 24), ticks=ticks, batch=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_prefetching_agrees_with_a_plain_simulation(
    trace: RoutingTrace, slots: int, ticks: tuple[int, int], batch: int
) -> None:
    gates = gates_of(trace, batch)
    slots = min(max(slots, max(map(len, gates))), trace.num_layers * trace.num_experts)
    load, compute = max(ticks[0], 1), ticks[1]
    geometry = (gates, trace.num_layers, slots, load, compute)
    bounds = TraceSimulator(trace).bounds(
        trace.sequences(), slots=slots, load_ratio=load / compute, batch=batch
    )
    num_tokens = int(trace.seq_len.sum())
    belady = Plain(*geometry).run(is_lru=False, prefetches=False)
    assert bounds.belady * num_tokens == pytest.approx(belady.time)
    assert bounds.fewest_loads * num_tokens == pytest.approx(belady.misses)
    perfect = Plain(*geometry).run(is_lru=False, prefetches=True)
    assert bounds.perfect_prefetch * num_tokens == pytest.approx(perfect.time)


def check_laws(result: Simulation, num_layers: int, slots: int) -> None:
    assert result.time == pytest.approx(result.compute + result.stall)
    assert result.compute == result.num_steps * num_layers
    assert result.on_demand_loads == result.misses
    unused = result.prefetch_loads - result.prefetches_used - result.prefetches_wasted
    assert 0 <= unused <= slots  # still in the cache
    assert result.prefetches_cancelled <= result.prefetches_wasted
    in_cache = result.num_loads - result.evictions - result.prefetches_cancelled
    assert 0 <= in_cache <= slots


@given(trace=traces(), load_ratio=st.floats(0, 4), batch=st.integers(1, 3), data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_loaded_is_asked_for_evicted_or_still_there(
    trace: RoutingTrace, load_ratio: float, batch: int, data: st.DataObject
) -> None:
    num_experts = trace.num_layers * trace.num_experts
    slots = data.draw(st.integers(trace.top_k, num_experts))
    for policy in ("lru", "lfu", "ema"):
        result = TraceSimulator(trace).run(
            policy, trace.sequences(), slots=slots, load_ratio=load_ratio, batch=batch
        )
        check_laws(result, trace.num_layers, slots)


def test_a_batch_of_one_has_as_many_steps_as_tokens() -> None:
    trace = make_trace(40, 3, 8, 2, [10] * 4, seed=1)
    one = TraceSimulator(trace).run("lru", trace.sequences(), slots=8, load_ratio=1)
    assert one.num_steps == one.num_tokens == 40


def test_a_batch_shares_steps_and_loads() -> None:
    trace = make_trace(40, 3, 8, 2, [10] * 4, seed=1)
    simulator = TraceSimulator(trace)
    one = simulator.run("lru", trace.sequences(), slots=24, load_ratio=1)
    four = simulator.run("lru", trace.sequences(), slots=24, load_ratio=1, batch=4)
    assert four.num_steps == 10
    assert four.num_loads == one.num_loads  # everything fits: each expert once
    assert four.time < one.time


def test_a_cache_of_everything_loads_each_expert_once() -> None:
    trace = make_trace(30, 2, 4, 2, [30], seed=2)
    result = TraceSimulator(trace).run("lru", trace.sequences(), slots=8, load_ratio=3)
    assert result.num_loads <= 8
    assert result.stall == 3 * result.num_loads


def test_no_offload_stalls_only_until_everything_is_there() -> None:
    trace = make_trace(30, 2, 4, 2, [30], seed=2)
    result = TraceSimulator(trace).run("no-offload", trace.sequences(), slots=8, load_ratio=0.5)
    assert result.num_loads == 8
    assert result.stall <= 4
    assert result.prefetches_wasted == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "clever"}, "'clever' is unknown; choose one of"),
        ({"slots": 0}, "num_slots must be positive"),
        ({"slots": 9}, "9 slots for 8 experts"),
        ({"load_ratio": -1.0}, "load time must be 0 or more"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"prediction_delay": -1.0}, "prediction_delay must be 0 or more"),
        ({"measured": []}, "no sequence to measure"),
        ({"eviction": "random"}, "eviction 'random' is unknown"),
    ],
)
def test_a_value_that_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    trace = make_trace(6, 2, 4, 2, [6], seed=3)
    fitting = {"policy": "lru", "measured": trace.sequences(), "slots": 4, "load_ratio": 1.0}
    with pytest.raises(ConfigError, match=message):
        TraceSimulator(trace).run(**{**fitting, **change})  # type: ignore[arg-type]
