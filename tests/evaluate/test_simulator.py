"""The native simulator against a plain one that counts time in ticks, and its laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.simulator import (
    Belady,
    Gate,
    Lru,
    PerfectPrefetch,
    PlainSimulator,
    Script,
    gates_of,
)

from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.simulator import Simulation, TraceSimulator
from fmoe_ray.policy import (
    ExpertCache,
    GateRequested,
    Instruction,
    Policy,
    VictimNeeded,
    list_policies,
)
from fmoe_ray.trace.format import RoutingTrace

PREDICTING = [info.name for info in list_policies() if info.predictor != "none"]


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


ticks = st.tuples(st.integers(1, 5), st.integers(1, 3))


@st.composite
def settings_of_runs(draw: st.DrawFn) -> tuple[RoutingTrace, int, list[Gate], int]:
    """(trace, batch, its gates, slots that hold what any gate needs)"""
    trace = draw(traces())
    batch = draw(st.integers(1, 3))
    gates = gates_of(trace, batch)
    slots = draw(st.integers(max(map(len, gates)), trace.num_layers * trace.num_experts))
    return trace, batch, gates, slots


@given(run=settings_of_runs(), ticks=ticks)
@settings(max_examples=150, deadline=None)
def test_lru_agrees_with_a_plain_simulation(
    run: tuple[RoutingTrace, int, list[Gate], int], ticks: tuple[int, int]
) -> None:
    trace, batch, gates, slots = run
    load, compute = ticks
    plain = PlainSimulator(gates, trace.num_layers, slots, load, compute, Lru()).run()
    native = TraceSimulator(trace).run(
        "lru", trace.sequences(), slots=slots, load_ratio=load / compute, batch=batch
    )
    assert (native.hits, native.late, native.misses) == (plain.hits, 0, plain.misses)
    assert native.time == pytest.approx(plain.time)
    assert native.num_steps * trace.num_layers == len(gates)
    assert native.num_tokens == trace.seq_len.sum()


@given(run=settings_of_runs(), ticks=ticks)
@settings(max_examples=150, deadline=None)
def test_belady_and_perfect_prefetch_agree_with_a_plain_simulation(
    run: tuple[RoutingTrace, int, list[Gate], int], ticks: tuple[int, int]
) -> None:
    trace, batch, gates, slots = run
    load, compute = ticks
    bounds = TraceSimulator(trace).bounds(
        trace.sequences(), slots=slots, load_ratio=load / compute, batch=batch
    )
    num_tokens = int(trace.seq_len.sum())
    belady = PlainSimulator(gates, trace.num_layers, slots, load, compute, Belady()).run()
    assert bounds.belady * num_tokens == pytest.approx(belady.time)
    assert bounds.fewest_loads * num_tokens == pytest.approx(belady.misses)
    perfect = PlainSimulator(gates, trace.num_layers, slots, load, compute, PerfectPrefetch()).run()
    assert bounds.perfect_prefetch * num_tokens == pytest.approx(perfect.time)


class ScriptedPolicy(Policy):
    """As reference.simulator.Script."""

    def __init__(self, wanted: list[list[int]]) -> None:
        super().__init__()
        self.wanted = wanted
        self.position = -1

    def gate_requested(self, event: GateRequested, cache: ExpertCache) -> list[Instruction]:
        self.position += 1
        return []

    def evictable(self, cache: ExpertCache) -> int:
        return min((e for e in cache.residents if cache.can_evict(e)), default=-1)

    def link_free(self, cache: ExpertCache) -> list[Instruction]:
        wanted = self.wanted[self.position] if self.position >= 0 else []
        absent = [expert for expert in wanted if cache.is_absent(expert)]
        victim = -1 if cache.num_free else self.evictable(cache)
        if not absent or (victim < 0 and not cache.num_free):
            return []
        return [Instruction.start_copy(absent[0], victim)]

    def victim(self, needed: VictimNeeded, cache: ExpertCache) -> int:
        return self.evictable(cache)


@given(run=settings_of_runs(), ticks=ticks, data=st.data())
@settings(max_examples=150, deadline=None)
def test_scripted_prefetches_agree_with_a_plain_simulation(
    run: tuple[RoutingTrace, int, list[Gate], int], ticks: tuple[int, int], data: st.DataObject
) -> None:
    trace, batch, gates, slots = run
    load, compute = ticks
    experts = st.integers(0, trace.num_layers * trace.num_experts - 1)
    some = st.lists(experts, max_size=3, unique=True)
    wanted = data.draw(st.lists(some, min_size=len(gates), max_size=len(gates)))
    plain = PlainSimulator(gates, trace.num_layers, slots, load, compute, Script(wanted)).run()
    native = TraceSimulator(trace).run(
        "scripted",
        trace.sequences(),
        slots=slots,
        load_ratio=load / compute,
        batch=batch,
        policy_object=ScriptedPolicy(wanted),
    )
    counted = (native.hits, native.late, native.misses, native.prefetch_loads)
    assert counted == (plain.hits, plain.late, plain.misses, plain.prefetches)
    assert native.time == pytest.approx(plain.time)


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
@settings(max_examples=50, deadline=None)
def test_what_is_loaded_is_asked_for_evicted_or_still_there(
    trace: RoutingTrace, load_ratio: float, batch: int, data: st.DataObject
) -> None:
    num_experts = trace.num_layers * trace.num_experts
    slots = data.draw(st.integers(trace.top_k, num_experts))
    for policy in ("lru", "lfu", "ema", *PREDICTING):
        result = TraceSimulator(trace).run(
            policy, trace.sequences(), slots=slots, load_ratio=load_ratio, batch=batch
        )
        check_laws(result, trace.num_layers, slots)


@pytest.mark.parametrize("policy", ["ema", *PREDICTING])
def test_the_same_run_has_the_same_result(policy: str) -> None:
    trace = make_trace(60, 4, 8, 2, [20] * 3, seed=5)
    learned, measured = trace.split(0.7)
    first, second = (
        TraceSimulator(trace).run(policy, measured, slots=12, load_ratio=0.7, learned=learned)
        for _ in range(2)
    )
    assert (first.time, first.num_loads, first.recall) == (
        second.time,
        second.num_loads,
        second.recall,
    )


def test_learning_helps_the_paper_policy_on_a_routing_that_repeats() -> None:
    once = make_trace(12, 6, 16, 2, [12], seed=6)
    trace = RoutingTrace(
        expert_ids=np.concatenate([once.expert_ids] * 2),
        weights=np.concatenate([once.weights] * 2),
        seq_start=np.array([0, 12]),
        seq_len=np.array([12, 12]),
        num_experts=16,
        token_ids=np.arange(24, dtype=np.int32) % 12,
    )
    learned, measured = trace.split(0.5)
    simulator = TraceSimulator(trace)
    blank = simulator.run("fmoe", measured, slots=32, load_ratio=0.4)
    taught = simulator.run("fmoe", measured, slots=32, load_ratio=0.4, learned=learned)
    assert taught.recall[3].top_k == 1.0
    assert taught.time < blank.time


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
