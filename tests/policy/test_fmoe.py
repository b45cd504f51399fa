"""The paper's policy to the letter: 4.3 prefetch, 4.5 eviction."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.policy import LiteralFmoe, delta, e_prefetch

from fmoe_ray import policy as fp

GEOMETRY = fp.Geometry(4, 6, 2)
Floats = NDArray[np.float32]
start = fp.Instruction.start_copy


def make_fmoe(geometry: fp.Geometry = GEOMETRY, **options: Any) -> fp.PolicyParts:
    return fp.make_policy("fmoe", geometry=geometry, num_slots=24, **options)


def predict(layer: int, p: list[float], score: float = 1.0, iteration: int = 1) -> fp.Prediction:
    return fp.Prediction(
        iteration=iteration,
        observed_layer=-1,
        first_layer=layer,
        p=np.array([[p]], np.float32),
        score=np.array([[score]], np.float32),
    )


def load(planner: fp.Planner, layer: int, experts: list[int]) -> None:
    """Brings experts in on demand."""
    planner.request_gate(layer, experts)
    for command in planner.take_commands():
        planner.copy_done(command.expert)
    planner.release_all()


@pytest.mark.parametrize(
    ("score", "expected"), [(1.0, 0.0), (0.75, 0.25), (0.0, 1.0), (-0.5, 1.0), (1.0001, 0.0)]
)
def test_4_3_delta_is_clipped_one_minus_score(score: float, expected: float) -> None:
    assert fp.prefetch_threshold(score) == pytest.approx(expected)


@given(
    p=st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 0.5]), min_size=1, max_size=12),
    score=st.floats(-1, 1.5, width=32),
    top_k=st.integers(1, 4),
)
def test_4_3_e_prefetch_reaches_delta_and_k(p: list[float], score: float, top_k: int) -> None:
    row = np.array(p, np.float32)
    taken = fp.select_prefetch(row, score, top_k)
    assert taken == e_prefetch(row, score, top_k)
    available = int(np.count_nonzero(row))
    assert len(taken) >= min(top_k, available)
    assert sum((float(row[j]) for j in taken), start=0.0) >= delta(score) or len(taken) == available


def test_4_3_a_sure_match_prefetches_exactly_k() -> None:
    assert fp.select_prefetch(np.full(6, 1 / 6, np.float32), 1.0, 2) == [0, 1]


def test_4_3_an_unsure_match_prefetches_more() -> None:
    assert fp.select_prefetch(np.array([0.1, 0.4, 0.3, 0.2], np.float32), 0.2, 2) == [1, 2, 3]


def test_4_3_prefetch_priority_is_p_over_distance() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 24, parts.policy, prefetch_depth=9)
    planner.start_iteration(1)
    parts.policy.predicted(predict(0, [0.3, 0.25, 0, 0, 0, 0]), planner.cache)
    parts.policy.predicted(predict(1, [0.7, 0.4, 0, 0, 0, 0]), planner.cache)
    # 0.7 / 2 > 0.3 / 1 > 0.25 / 1 > 0.4 / 2, since l_now is 0 before layer 1
    orders = [parts.policy.link_free(planner.cache)[0].expert for _ in range(4)]
    assert orders == [6, 0, 1, 7]
    assert parts.policy.link_free(planner.cache) == []


def test_4_3_distance_shrinks_as_layers_pass() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1)
    load(planner, 0, [0])
    parts.policy.predicted(predict(1, [0.3, 0, 0, 0, 0, 0]), planner.cache)
    parts.policy.predicted(predict(3, [0.8, 0, 0, 0, 0, 0]), planner.cache)
    assert parts.policy.link_free(planner.cache) == [start(6, -1)]  # 0.3 / 1 > 0.8 / 3
    parts.policy.predicted(predict(2, [0.7, 0, 0, 0, 0, 0]), planner.cache)
    assert parts.policy.link_free(planner.cache) == [start(12, -1)]  # 0.7 / 2 > 0.8 / 3
    parts.policy.predicted(predict(2, [0.7, 0, 0, 0, 0, 0]), planner.cache)
    planner.request_gate(1, [0])  # a miss: the link is not offered
    assert parts.policy.link_free(planner.cache) == [start(12, -1)]  # 0.7 / 1 > 0.8 / 2


def test_4_3_equal_priorities_fall_to_the_lower_expert() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1)
    parts.policy.predicted(predict(0, [0, 0.5, 0, 0.5, 0, 0]), planner.cache)
    assert parts.policy.link_free(planner.cache) == [start(1, -1)]
    assert parts.policy.link_free(planner.cache) == [start(3, -1)]


def test_4_3_an_order_lapses_with_its_layer() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1)
    parts.policy.predicted(predict(1, [0.5, 0.5, 0, 0, 0, 0]), planner.cache)
    load(planner, 1, [4])
    assert parts.policy.link_free(planner.cache) == []


def test_batch_orders_the_union_with_the_largest_p() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1, num_rows=2)
    p = np.array([[[0.5, 0.3, 0.2, 0, 0, 0]], [[0.1, 0, 0, 0, 0.6, 0.3]]], np.float32)
    parts.policy.predicted(
        fp.Prediction(iteration=1, observed_layer=-1, first_layer=0, p=p), planner.cache
    )
    orders = [parts.policy.link_free(planner.cache)[0].expert for _ in range(4)]
    assert orders == [4, 0, 1, 5]  # p 0.6, 0.5, 0.3, 0.3; expert 2 is in no row's first K


def test_4_5_the_largest_inverse_of_p_times_frequency_is_evicted() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 3, parts.policy)
    planner.start_iteration(1)
    parts.policy.predicted(predict(0, [0.6, 0.25, 0.1, 0, 0, 0]), planner.cache)
    for experts in ([0], [1], [2], [2], [2], [1]):
        load(planner, 0, experts)
    # p * freq: 0.6 * 1, 0.25 * 2, 0.1 * 3
    planner.request_gate(1, [0])
    assert not planner.cache.is_ready(2)


def test_4_5_frequency_survives_eviction() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    for experts in ([0], [0], [0], [1], [2], [2]):  # 2 evicts 1, not the thrice used 0
        load(planner, 0, experts)
    assert planner.cache.is_ready(0) and planner.cache.is_ready(2)
    load(planner, 0, [1])  # evicts 2 (freq 2): freq 3 of expert 0 is larger
    load(planner, 0, [3])  # 1 has freq 2 by now, also because its first use still counts
    assert planner.cache.is_ready(0) and planner.cache.is_ready(3)
    assert planner.cache.frequency(1) == 2


def test_4_5_ties_fall_to_the_lower_expert() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 3, parts.policy)
    planner.start_iteration(1)
    for expert in (5, 3, 4):
        load(planner, 0, [expert])
    planner.request_gate(1, [0])
    assert sorted(planner.cache.residents) == [4, 5, 6]


def test_4_5_a_layer_without_a_match_has_p_one_over_j() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    parts.policy.predicted(predict(0, [0.9, 0.1, 0, 0, 0, 0]), planner.cache)
    load(planner, 0, [1])  # p 0.1
    load(planner, 1, [0])  # p 1 / 6
    planner.request_gate(2, [0])
    assert sorted(planner.cache.residents) == [6, 12]


def test_4_5_floors_keep_p_and_frequency_from_infinity() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    p = [0.5, 1e-9, 1e-8, 0, 0, 0]
    parts.policy.predicted(predict(0, p), planner.cache)
    load(planner, 0, [2])
    load(planner, 0, [1])
    load(planner, 0, [2])
    planner.request_gate(1, [0])  # both have p 1e-6 by the floor; 1 was used less often
    assert sorted(planner.cache.residents) == [2, 6]


def test_a_prefetch_does_not_undo_another_order_but_a_miss_may() -> None:
    parts = make_fmoe()
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    load(planner, 0, [0])
    load(planner, 0, [0])
    planner.predicted(predict(1, [0.02, 0.01, 0, 0, 0, 0]))
    (first,) = planner.take_commands()
    planner.copy_done(first.expert)
    (second,) = planner.take_commands()  # takes the place of expert 0, p 1/6 freq 2
    planner.copy_done(second.expert)
    assert sorted(planner.cache.residents) == [6, 7]
    planner.predicted(predict(2, [0.9, 0, 0, 0, 0, 0]))
    assert planner.take_commands() == []
    planner.request_gate(0, [5])
    assert sorted(planner.cache.residents) == [5, 6]


def test_only_experts_of_the_own_shard_are_ordered() -> None:
    parts = make_fmoe(shard=1, num_shards=2)
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1)
    parts.policy.predicted(predict(0, [0.3, 0.3, 0.2, 0.2, 0, 0], score=0), planner.cache)
    assert parts.policy.link_free(planner.cache) == [start(1, -1)]
    assert parts.policy.link_free(planner.cache) == [start(3, -1)]
    assert parts.policy.link_free(planner.cache) == []


def run_random(policy: fp.Policy, seed: int, num_slots: int) -> list[tuple[str, int, int]]:
    """Random gates, predictions and copies in random order; what the link was told."""
    rng = np.random.default_rng(seed)
    planner = fp.Planner(GEOMETRY, num_slots, policy, prefetch_depth=int(rng.integers(1, 4)))
    told: list[tuple[str, int, int]] = []
    in_flight: list[int] = []

    def pump() -> None:
        for command in planner.take_commands():
            told.append((str(command.kind), command.expert, command.slot))
            if command.kind == fp.LinkCommand.Kind.start:
                in_flight.append(command.expert)
            elif command.kind == fp.LinkCommand.Kind.cancel:
                in_flight.remove(command.expert)

    for iteration in range(1, 9):
        planner.start_iteration(iteration)
        for layer in range(GEOMETRY.num_layers):
            if rng.random() < 0.8:
                first = int(rng.integers(0, 4))
                shape = (int(rng.integers(1, 3)), int(rng.integers(1, 5 - first)))
                p = rng.dirichlet(np.ones(6) * 0.3, size=shape).astype(np.float32)
                p[rng.random(p.shape) < 0.2] = 0
                planner.predicted(
                    fp.Prediction(
                        iteration=iteration,
                        observed_layer=layer - 1,
                        first_layer=first,
                        p=p,
                        score=rng.uniform(-0.2, 1.2, size=shape).astype(np.float32),
                    )
                )
                pump()
            experts = rng.choice(6, size=2, replace=False).tolist()
            planner.request_gate(layer, experts)
            pump()
            while in_flight and rng.random() < 0.7:
                planner.copy_done(in_flight.pop(int(rng.integers(len(in_flight)))))
                pump()
            planner.check_integrity()
        while in_flight:
            planner.copy_done(in_flight.pop(0))
            pump()
        planner.iteration_ended()
        pump()
    return told


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), num_slots=st.integers(2, 24))
def test_instructions_equal_those_of_the_literal_policy(seed: int, num_slots: int) -> None:
    native = run_random(make_fmoe().policy, seed, num_slots)
    assert native == run_random(LiteralFmoe(GEOMETRY), seed, num_slots)
    assert native
