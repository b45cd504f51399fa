"""Policy fmoe+ through planner and simulator: its laws on any geometry, its floor whatever is
predicted, and what it gains on real routing.
"""

from importlib.resources import as_file, files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ray.evaluate.simulator import Simulation, TraceSimulator
from fmoe_ray.policy import (
    GateObservation,
    Geometry,
    IterationContext,
    Planner,
    Prediction,
    Predictor,
    list_policies,
    make_policy,
)
from fmoe_ray.trace.format import RoutingTrace, load_trace


def make_trace(
    geometry: Geometry, lengths: list[int], *, seed: int, with_tokens: bool = True
) -> RoutingTrace:
    """Each token prefers some experts of each layer, mostly the same again."""
    rng = np.random.default_rng(seed)
    num_tokens, num_kinds = sum(lengths), 12
    tokens = rng.integers(0, num_kinds, num_tokens).astype(np.int32)
    liking = 2 * rng.gumbel(size=(num_kinds, geometry.num_layers, geometry.num_experts))
    noise = rng.gumbel(size=(num_tokens, geometry.num_layers, geometry.num_experts))
    seq_len = np.array(lengths, np.int64)
    return RoutingTrace(
        expert_ids=np.argsort(-(liking[tokens] + noise), axis=-1)[..., : geometry.top_k],
        weights=rng.random((num_tokens, geometry.num_layers, geometry.top_k)).astype(np.float32),
        seq_start=np.cumsum(seq_len) - seq_len,
        seq_len=seq_len,
        num_experts=geometry.num_experts,
        token_ids=tokens if with_tokens else None,
    )


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    num_experts = draw(st.integers(1, 9))
    return Geometry(draw(st.integers(1, 6)), num_experts, draw(st.integers(1, num_experts)))


@given(geometry=geometries(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_of_gates_copies_and_predictions_keeps_the_planner_sound(
    geometry: Geometry, data: st.DataObject
) -> None:
    num_layers, num_experts = geometry.num_layers, geometry.num_experts
    size = num_layers * num_experts
    shards = data.draw(st.integers(1, min(2, num_experts)))
    slots = data.draw(st.integers(1, size))
    eviction = data.draw(st.sampled_from(["policy", "lru", "fmoe"]))
    parts = make_policy(
        "fmoe+", geometry=geometry, num_slots=slots, num_shards=shards, eviction=eviction
    )
    predictor = parts.predictor
    assert predictor is not None
    planner = Planner(geometry, slots, parts.policy, prefetch_depth=data.draw(st.integers(1, 3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    in_flight: list[int] = []

    def settle(finishes: bool) -> None:
        for command in planner.take_commands():
            if command.kind.name == "start":
                assert command.expert % shards == 0  # shard 0's own
                in_flight.append(command.expert)
            elif command.kind.name == "cancel":
                in_flight.remove(command.expert)
        while in_flight and (finishes or rng.random() < 0.5):
            planner.copy_done(in_flight.pop(int(rng.integers(len(in_flight)))))
            settle(False)
        planner.check_integrity()

    for iteration in range(1, 8):
        rows = int(rng.integers(1, 3))
        planner.start_iteration(
            iteration, num_rows=rows, layer_time=float(rng.random()), load_time=float(rng.random())
        )
        context = IterationContext(iteration, list(range(rows)), token_ids=[1] * rows)
        said = predictor.iteration_started(context)
        for layer in range(num_layers):
            chosen = np.zeros((rows, num_experts), np.uint8)
            for row in range(rows):
                chosen[row, rng.permutation(num_experts)[: geometry.top_k]] = 1
            hosted = [
                e for e in np.flatnonzero(chosen.any(0)) if (layer * num_experts + e) % shards == 0
            ]
            if rng.random() < 0.8:
                for prediction in said:
                    planner.predicted(prediction)
            settle(False)
            planner.request_gate(layer, [int(e) for e in hosted])
            said = predictor.gate_observed(
                GateObservation(layer, chosen.astype(np.float32), chosen=chosen)
            )
            while True:
                settle(True)
                if planner.num_waiting == 0:
                    break
                for expert in range(layer * num_experts, (layer + 1) * num_experts):
                    if planner.cache.is_ready(expert) and planner.cache.is_pinned(expert):
                        planner.release(expert)
            planner.release_all()
        planner.iteration_ended()
        predictor.iteration_ended()
    planner.check_integrity()


class WrongPredictor(Predictor):
    """Sure of experts that are not needed: what is needed gets 0, random others 1."""

    def __init__(self, geometry: Geometry, trace: RoutingTrace) -> None:
        super().__init__(geometry)
        self._geometry = geometry
        self._ids = trace.expert_ids
        self._token = -1
        self._rng = np.random.default_rng(1)
        self._iteration = 0

    def _predict(self, observed: int, layers: range, *, is_next: bool) -> Prediction:
        p = self._rng.integers(0, 2, (1, len(layers), self._geometry.num_experts))
        token = min(self._token + is_next, len(self._ids) - 1)
        for i, layer in enumerate(layers):
            p[0, i, self._ids[token, layer]] = 0
        return Prediction(
            self._iteration, observed, layers.start, p.astype(np.float32), is_next_iteration=is_next
        )

    def iteration_started(self, context: IterationContext) -> list[Prediction]:
        self._token += 1
        self._iteration = context.iteration
        return [self._predict(-1, range(self._geometry.num_layers), is_next=False)]

    def gate_observed(self, gate: GateObservation) -> list[Prediction]:
        after = range(gate.layer + 1, self._geometry.num_layers)
        made = [self._predict(gate.layer, range(gate.layer, gate.layer + 1), is_next=True)]
        return [*made, self._predict(gate.layer, after, is_next=False)] if after else made

    def iteration_ended(self) -> list[Prediction]:
        return []

    def request_ended(self, request: int) -> None:
        pass

    def is_synchronous(self) -> bool:
        return False

    def wants_speculative(self) -> bool:
        return False


@pytest.mark.parametrize(("slots", "load_ratio"), [(12, 0.5), (24, 2.0), (36, 8.0)])
def test_wrong_predictions_cost_at_most_one_percent_of_the_better_floor(
    slots: int, load_ratio: float
) -> None:
    geometry = Geometry(4, 12, 2)
    trace = make_trace(geometry, [1500] * 2, seed=3)
    simulator = TraceSimulator(trace)

    def run(policy: str, *, is_wrong: bool = False) -> Simulation:
        parts = make_policy(policy, geometry=geometry, num_slots=slots)
        return simulator.run(
            policy,
            trace.sequences(),
            slots=slots,
            load_ratio=load_ratio,
            policy_object=parts.policy,
            predictor_object=WrongPredictor(geometry, trace) if is_wrong else None,
        )

    floor = min(run("lru").time, run("ema").time)
    dearest_iteration = 4 + 8 * load_ratio
    assert run("fmoe+", is_wrong=True).time <= 1.01 * floor + 5 * dearest_iteration


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("shape", [(6, 8, 2), (3, 20, 3)])
def test_it_beats_both_floors_on_routing_that_tokens_explain(
    shape: tuple[int, int, int], with_tokens: bool
) -> None:
    geometry = Geometry(*shape)
    trace = make_trace(geometry, [300] * 10, seed=4, with_tokens=with_tokens)
    learned, measured = trace.split(0.7)
    slots = geometry.num_layers * geometry.num_experts // 3
    simulator = TraceSimulator(trace)
    for batch in (1, 3):
        floor, other, plus = (
            simulator.run(
                policy, measured, slots=slots, load_ratio=0.5, learned=learned, batch=batch
            ).time
            for policy in ("lru", "ema", "fmoe+")
        )
        assert plus < min(floor, other)


@pytest.fixture(scope="module")
def small() -> TraceSimulator:
    with as_file(files("fmoe_ray") / "assets/traces/gpt-oss-20b-small.npz") as path:
        return TraceSimulator(load_trace(path))


@pytest.mark.parametrize(("budget", "load_ratio"), [(0.125, 1.0), (0.25, 2.0), (0.5, 0.5)])
def test_it_closes_half_of_the_gap_on_real_routing(
    small: TraceSimulator, budget: float, load_ratio: float
) -> None:
    trace = small.trace
    learned, measured = trace.split(0.7)
    slots = int(budget * trace.num_layers * trace.num_experts)
    lru = small.run("lru", measured, slots=slots, load_ratio=load_ratio)
    plus = small.run("fmoe+", measured, slots=slots, load_ratio=load_ratio, learned=learned)
    bound = small.bounds(measured, slots=slots, load_ratio=load_ratio).clairvoyant
    closed = (lru.time_per_token - plus.time_per_token) / (lru.time_per_token - bound)
    assert closed > 0.5
    assert plus.recall[3].top_k > 0.7


def test_runs_that_share_what_was_learnt_equal_a_run_alone(small: TraceSimulator) -> None:
    learned, measured = small.trace.split(0.7)
    few, some = measured[:3], learned[:6]
    small.run("fmoe+", few, slots=96, load_ratio=1, learned=some)
    shared = small.run("fmoe+", few, slots=192, load_ratio=2, learned=some)
    alone = TraceSimulator(small.trace).run("fmoe+", few, slots=192, load_ratio=2, learned=some)
    assert (shared.time, shared.num_loads, shared.recall) == (
        alone.time,
        alone.num_loads,
        alone.recall,
    )


def test_it_is_in_the_table_of_policies() -> None:
    assert {info.name: info.predictor for info in list_policies()}["fmoe+"] == "online"
