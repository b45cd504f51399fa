"""The bounds against the optimum of instances that are small enough to try every schedule."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.simulator import gates_of

from fmoe_ray.evaluate.simulator import Bounds, TraceSimulator
from fmoe_ray.trace.format import RoutingTrace

Gate = frozenset[int]


@st.composite
def tiny_traces(draw: st.DrawFn) -> RoutingTrace:
    """At most five gates over at most five experts."""
    num_layers = draw(st.integers(1, 2))
    num_experts = draw(st.integers(2, 5 if num_layers == 1 else 2))
    top_k = draw(st.integers(1, 2))
    num_tokens = draw(st.integers(1, 5 if num_layers == 1 else 2))
    choice = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    ids = [[draw(choice) for _ in range(num_layers)] for _ in range(num_tokens)]
    return RoutingTrace(
        expert_ids=np.array(ids),
        weights=np.ones((num_tokens, num_layers, top_k), np.float32),
        seq_start=np.array([0]),
        seq_len=np.array([num_tokens]),
        num_experts=num_experts,
    )


State = tuple[int, int, Gate, tuple[tuple[int, int], ...]]
"""Next gate, ticks its predecessor still computes, experts that are ready, and copies under way
with the ticks they still take."""


def next_states(
    state: State, gates: list[Gate], slots: int, load: int, compute: int
) -> Iterator[State]:
    """All that can be one tick later: the link moves one copy, begun now or before, or rests."""
    position, left, ready, copies = state
    if left == 0 and gates[position] <= ready:
        position, left = position + 1, compute
    pinned = gates[position - 1] if left else frozenset()
    remaining = max(left - 1, 0)
    yield position, remaining, ready, copies
    under_way = dict(copies)
    for expert, ticks in copies:
        rest = {other: t for other, t in copies if other != expert}
        if ticks == 1:
            yield position, remaining, ready | {expert}, tuple(sorted(rest.items()))
        else:
            yield position, remaining, ready, tuple(sorted({**rest, expert: ticks - 1}.items()))
    for expert in frozenset().union(*gates[position:]) - ready - set(under_way):
        has_room = len(ready) + len(copies) < slots
        for kept in [ready] if has_room else [ready - {victim} for victim in ready - pinned]:
            if load == 1:
                yield position, remaining, kept | {expert}, copies
            else:
                begun = {**under_way, expert: load - 1}
                yield position, remaining, kept, tuple(sorted(begun.items()))


def shortest_ticks(gates: list[Gate], slots: int, load: int, compute: int) -> int:
    """Ticks of the best of all schedules, breadth first."""
    states: set[State] = {(0, 0, frozenset(), ())}
    elapsed = 0
    while True:
        if any(position == len(gates) and left == 0 for position, left, _, _ in states):
            return elapsed
        # What has computed everything but the last ticks has nothing left to decide.
        states = {
            after
            for state in states
            for after in (
                [(state[0], state[1] - 1, state[2], state[3])]
                if state[0] == len(gates)
                else next_states(state, gates, slots, load, compute)
            )
        }
        elapsed += 1


def fewest_loads_by_search(gates: list[Gate], slots: int) -> int:
    """Of all choices of victims when loading on demand."""
    best: dict[Gate, int] = {frozenset(): 0}
    for needed in gates:
        after: dict[Gate, int] = {}
        for ready, loads in best.items():
            for kept in subsets_to_keep(ready - needed, slots - len(needed)):
                cache = kept | needed
                cost = loads + len(needed - ready)
                after[cache] = min(cost, after.get(cache, cost))
        best = after
    return min(best.values())


def subsets_to_keep(ready: Gate, room: int) -> Iterator[Gate]:
    for bits in range(2 ** len(ready)):
        kept = frozenset(e for i, e in enumerate(sorted(ready)) if bits >> i & 1)
        if len(kept) <= room:
            yield kept


def totals(bounds: Bounds, trace: RoutingTrace) -> tuple[float, float, float]:
    per_token = (bounds.lower_bound, bounds.clairvoyant, bounds.fewest_loads)
    lower, clairvoyant, loads = (value * trace.num_tokens for value in per_token)
    return lower, clairvoyant, loads


@given(
    trace=tiny_traces(),
    ticks=st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_optimum_lies_between_lower_bound_and_clairvoyant(
    trace: RoutingTrace, ticks: tuple[int, int], data: st.DataObject
) -> None:
    load, compute = ticks
    slots = data.draw(st.integers(trace.top_k, trace.num_layers * trace.num_experts))
    bounds = TraceSimulator(trace).bounds(trace.sequences(), slots=slots, load_ratio=load / compute)
    lower, clairvoyant, loads = totals(bounds, trace)
    gates = [frozenset(gate) for gate in gates_of(trace)]
    optimum = shortest_ticks(gates, slots, load, compute) / compute
    assert lower <= optimum + 1e-9
    assert optimum <= clairvoyant + 1e-9
    assert loads == pytest.approx(fewest_loads_by_search(gates, slots))


@given(
    ids=st.lists(st.permutations(range(6)), min_size=1, max_size=30),
    top_k=st.integers(1, 3),
    load_ratio=st.floats(0, 4),
    batch=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_bounds_are_in_order(
    ids: list[list[int]], top_k: int, load_ratio: float, batch: int, data: st.DataObject
) -> None:
    """Also where a batch needs more experts than there are slots."""
    trace = RoutingTrace(
        expert_ids=np.array(ids)[:, None, :top_k],
        weights=np.ones((len(ids), 1, top_k), np.float32),
        seq_start=np.arange(len(ids)),
        seq_len=np.ones(len(ids), np.int64),
        num_experts=6,
    )
    slots = data.draw(st.integers(top_k, 6))
    simulator = TraceSimulator(trace)
    run = {"slots": slots, "load_ratio": load_ratio, "batch": batch}
    bounds = simulator.bounds(trace.sequences(), **run)  # type: ignore[arg-type]
    lru = simulator.run("lru", trace.sequences(), **run)  # type: ignore[arg-type]
    assert bounds.lower_bound <= bounds.clairvoyant + 1e-9
    assert bounds.clairvoyant <= bounds.belady
    assert bounds.clairvoyant == min(bounds.belady, bounds.perfect_prefetch)
    assert bounds.fewest_loads <= lru.num_loads / lru.num_tokens + 1e-9
    if batch * top_k <= slots:
        assert bounds.belady <= lru.time_per_token + 1e-9


@pytest.mark.parametrize(
    ("slots", "ticks"),
    [
        (2, 1 + 2 + 2),  # the second is loaded while the first computes
        (1, 1 + 2 + 1 + 2),
    ],
)
def test_the_search_finds_what_a_hand_does(slots: int, ticks: int) -> None:
    assert shortest_ticks([frozenset({0}), frozenset({1})], slots, load=1, compute=2) == ticks


def test_a_free_link_costs_compute_alone() -> None:
    trace = RoutingTrace(
        expert_ids=np.array([[[0], [1]], [[1], [0]]]),
        weights=np.ones((2, 2, 1), np.float32),
        seq_start=np.array([0]),
        seq_len=np.array([2]),
        num_experts=2,
    )
    bounds = TraceSimulator(trace).bounds(trace.sequences(), slots=1, load_ratio=0)
    assert bounds.lower_bound == bounds.clairvoyant == bounds.belady == 2
