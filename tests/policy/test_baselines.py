"""Baselines and ablations: what each predicts, orders, holds and evicts."""

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.maps import cosines, counts

from fmoe_ray import policy as fp
from fmoe_ray.errors import ConfigError

GEOMETRY = fp.Geometry(4, 6, 2)
hold = fp.Instruction.hold


def make(name: str, *, prefetch_distance: int = 3, eviction: str = "policy") -> fp.PolicyParts:
    return fp.make_policy(
        name,
        geometry=GEOMETRY,
        num_slots=24,
        prefetch_distance=prefetch_distance,
        eviction=eviction,
    )


def predictor_of(parts: fp.PolicyParts) -> fp.Predictor:
    assert parts.predictor is not None
    return parts.predictor


def gate(
    layer: int, experts: list[int], speculative: NDArray[np.float32] | None = None
) -> fp.GateObservation:
    chosen = np.zeros((1, 6), np.uint8)
    chosen[0, experts] = 1
    return fp.GateObservation(
        layer, (chosen / len(experts)).astype(np.float32), chosen, speculative
    )


def run_iteration(
    predictor: fp.Predictor, iteration: int, request: int, experts_by_layer: list[list[int]]
) -> list[fp.Prediction]:
    made = predictor.iteration_started(fp.IterationContext(iteration, [request]))
    for layer, experts in enumerate(experts_by_layer):
        made += predictor.gate_observed(gate(layer, experts))
    return made + predictor.iteration_ended()


def top(prediction: fp.Prediction, k: int = 2) -> list[int]:
    return sorted(np.argsort(-prediction.p[0, 0], kind="stable")[:k].tolist())


def test_every_policy_has_a_line_in_the_table() -> None:
    names = [info.name for info in fp.list_policies()]
    assert len(set(names)) == len(names)
    assert {
        "fmoe", "lru", "lfu", "ema", "no-offload", "deepspeed", "mixtral-offloading", "promoe",
        "moe-infinity", "speculate", "hit-count", "map-t", "map-ts", "map-tsd",
    } <= set(names)  # fmt: skip
    for info in fp.list_policies():
        assert info.description
        assert (make(info.name).predictor is None) == (info.predictor == "none")


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="'belady' is unknown; choose one of lru, lfu"):
        make("belady")


def test_an_unknown_eviction_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="'fifo' is unknown; choose lru, lfu, ema or fmoe"):
        make("fmoe", eviction="fifo")


@pytest.mark.parametrize(
    ("eviction", "left"),
    [("policy", [0, 18]), ("lru", [1, 18]), ("lfu", [0, 18]), ("fmoe", [0, 18])],
)
def test_eviction_overrides_the_policys_own(eviction: str, left: list[int]) -> None:
    parts = make("fmoe", eviction=eviction)
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    for layer, expert in ((0, 0), (0, 0), (0, 1), (3, 0)):
        planner.request_gate(layer, [expert])
        for command in planner.take_commands():
            planner.copy_done(command.expert)
        planner.release_all()
    assert sorted(planner.cache.residents) == left


def test_deepspeed_decides_as_lru() -> None:
    parts = make("deepspeed")
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    for expert in (0, 1, 0, 2):
        planner.request_gate(0, [expert])
        for command in planner.take_commands():
            planner.copy_done(command.expert)
    assert sorted(planner.cache.residents) == [0, 2]
    assert planner.counters.prefetch_loads == 0


def test_the_speculative_gate_predicts_the_next_layer() -> None:
    speculative = np.array([[0, 0.1, 0, 0.6, 0, 0.3]], np.float32)
    for name, is_synchronous in (("mixtral-offloading", True), ("speculate", False)):
        predictor = predictor_of(make(name))
        assert predictor.is_synchronous() == is_synchronous
        predictor.iteration_started(fp.IterationContext(3, [1]))
        (made,) = predictor.gate_observed(gate(1, [0, 1], speculative))
        assert (made.iteration, made.observed_layer, made.first_layer) == (3, 1, 2)
        assert np.array_equal(made.p[:, 0], speculative) and made.score.tolist() == [[1]]
        assert predictor.gate_observed(gate(2, [0, 1])) == []
        assert predictor.gate_observed(gate(3, [0, 1], speculative)) == []


def test_a_synchronous_policy_holds_the_layer_for_each_copy_it_ordered() -> None:
    parts = make("mixtral-offloading")
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1)
    p = np.array([[[0, 0.1, 0, 0.6, 0, 0.3]]], np.float32)
    made = fp.Prediction(iteration=1, observed_layer=0, first_layer=1, p=p)
    assert parts.policy.predicted(made, planner.cache) == [hold(1, 9), hold(1, 11)]
    assert make("speculate").policy.predicted(made, planner.cache) == []


def test_a_held_layer_waits_for_wrong_copies_too() -> None:
    parts = make("mixtral-offloading")
    planner = fp.Planner(GEOMETRY, 24, parts.policy)
    planner.start_iteration(1)
    planner.request_gate(0, [0])
    p = np.array([[[0, 0.1, 0, 0.6, 0, 0.3]]], np.float32)
    planner.predicted(fp.Prediction(iteration=1, observed_layer=0, first_layer=1, p=p))
    planner.copy_done(0)
    assert [command.expert for command in planner.take_commands()] == [0, 9]
    planner.request_gate(1, [3, 4])  # 9 was right, 11 was wrong, 10 is missed
    assert planner.is_held
    planner.copy_done(9)
    assert [command.expert for command in planner.take_commands()] == [9, 10]
    assert planner.is_held
    planner.copy_done(10)  # on demand before the wrong prefetch, which is still waited for
    assert [command.expert for command in planner.take_commands()] == [11]
    assert planner.is_held
    planner.copy_done(11)
    assert not planner.is_held


def test_a_hold_on_a_copy_that_finds_no_slot_lapses() -> None:
    parts = make("mixtral-offloading")
    planner = fp.Planner(GEOMETRY, 2, parts.policy)
    planner.start_iteration(1)
    p = np.array([[[0.5, 0.5, 0, 0, 0, 0]]], np.float32)
    planner.request_gate(0, [0, 1])
    planner.predicted(fp.Prediction(iteration=1, observed_layer=0, first_layer=1, p=p))
    for command in planner.take_commands():
        planner.copy_done(command.expert)
    planner.request_gate(1, [2, 3])
    for _ in range(4):
        for command in planner.take_commands():
            planner.copy_done(command.expert)
    assert not planner.is_held
    planner.check_integrity()


def test_hit_counts_are_projections_of_expert_maps() -> None:
    rng = np.random.default_rng(0)
    requests = {
        request: [[rng.choice(6, 2, replace=False).tolist() for _ in range(4)] for _ in range(5)]
        for request in range(4)
    }
    predictor = predictor_of(make("hit-count", prefetch_distance=1))
    matrices: list[NDArray[np.float64]] = []
    iteration = 0
    for request, iterations in requests.items():
        chosen = np.zeros((5, 4, 6), np.bool_)
        for t, layers in enumerate(iterations):
            for layer, experts in enumerate(layers):
                chosen[t, layer, experts] = True
        for t, layers in enumerate(iterations):
            made = run_iteration(predictor, iteration, request, layers)
            iteration += 1
            if not matrices:
                assert made == []
                continue
            for layer, prediction in enumerate(made):
                # Of the maps so far, with gates 0..layer of the iteration in progress.
                seen = counts(chosen[: t + 1])[: layer + 1]
                rows = seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)
                stored = np.array([matrix[: layer + 1] for matrix in matrices])
                best = cosines(rows, stored).argmax()
                np.testing.assert_allclose(prediction.p[0, 0], matrices[best][layer + 1], atol=1e-3)
        predictor.request_ended(request)
        matrix = counts(chosen)
        matrices.append(matrix / matrix.sum(axis=1, keepdims=True))


def test_moe_infinity_starts_with_the_most_popular_experts() -> None:
    predictor = predictor_of(make("moe-infinity"))
    assert predictor.is_synchronous()
    assert run_iteration(predictor, 1, 1, [[0, 1], [2, 3], [0, 1], [0, 1]]) == []
    run_iteration(predictor, 2, 1, [[0, 5], [2, 3], [0, 1], [0, 1]])
    (made,) = predictor.iteration_started(fp.IterationContext(3, [1]))
    assert (made.first_layer, made.num_layers, made.observed_layer) == (0, 1, -1)
    assert made.p[0, 0].tolist() == [1, 0.5, 0, 0, 0, 0.5]


def test_moe_infinity_follows_the_nearest_request_one_layer_ahead() -> None:
    predictor = predictor_of(make("moe-infinity"))
    run_iteration(predictor, 1, 1, [[0, 1], [0, 1], [0, 1], [0, 1]])
    run_iteration(predictor, 2, 2, [[4, 5], [4, 5], [4, 5], [4, 5]])
    predictor.request_ended(1)
    predictor.request_ended(2)
    predictor.iteration_started(fp.IterationContext(3, [3]))
    (made,) = predictor.gate_observed(gate(0, [4, 3]))
    assert made.first_layer == 1 and top(made) == [4, 5]


def test_promoe_learns_what_follows_at_its_stride() -> None:
    predictor = predictor_of(make("promoe", prefetch_distance=2))
    rng = np.random.default_rng(0)
    partner = {0: [1, 2], 1: [3, 4], 2: [0, 5]}

    def layers(kind: int) -> list[list[int]]:
        first = [kind, kind + 3]
        return [first, rng.choice(6, 2, replace=False).tolist(), partner[kind], [0, 1]]

    assert all(not made.p.any() for made in run_iteration(predictor, 0, 1, layers(0)))
    for iteration in range(1, 120):
        run_iteration(predictor, iteration, 1, layers(int(rng.integers(3))))
    for kind in range(3):
        predictor.iteration_started(fp.IterationContext(1000, [1]))
        (made,) = predictor.gate_observed(gate(0, layers(kind)[0]))
        assert made.first_layer == 2 and top(made) == sorted(partner[kind])
        assert made.score.tolist() == [[1]]


def test_figure_12a_ablations_leave_out_delta_and_the_semantic_search() -> None:
    embedding = np.ones((1, 2), np.float32)
    uniform = np.full((1, 6), 1 / 6, np.float32)
    peaked = np.array([[0.7, 0.3, 0, 0, 0, 0]], np.float32)
    found = {}
    for name in ("map-t", "map-ts", "map-tsd", "fmoe"):
        parts = fp.make_policy(
            name, geometry=GEOMETRY, num_slots=24, prefetch_distance=1, embedding_size=2
        )
        predictor = predictor_of(parts)
        for iteration, probs in ((1, peaked), (2, uniform)):
            made = predictor.iteration_started(fp.IterationContext(iteration, [1], embedding))
            for layer in range(4):
                made += predictor.gate_observed(fp.GateObservation(layer, probs))
            predictor.iteration_ended()
        found[name] = [(m.first_layer, float(m.score[0, 0])) for m in made]
    similarity = float(cosines(uniform, peaked)[0])
    assert found["map-t"] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert found["map-ts"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    assert [layer for layer, _ in found["map-tsd"]] == [0, 1, 2, 3]
    scores = [score for _, score in found["map-tsd"]]
    assert scores == pytest.approx([1, similarity, similarity, similarity], abs=1e-3)
    assert found["fmoe"] == found["map-tsd"]
