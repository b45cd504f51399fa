"""Predictions from expert maps against the literal searches (paper 4.2), and what is learnt."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.policy import LiteralSearch

from fmoe_ray import policy as fp


def make_predictor(geometry: fp.Geometry, **options: Any) -> fp.Predictor:
    parts = fp.make_policy("fmoe", geometry=geometry, num_slots=4, **options)
    assert parts.predictor is not None
    return parts.predictor


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    distance=st.integers(1, 6),
    num_layers=st.integers(1, 4),
)
def test_4_2_predictions_are_those_of_the_literal_searches(
    seed: int, distance: int, num_layers: int
) -> None:
    rng = np.random.default_rng(seed)
    geometry = fp.Geometry(num_layers, 6, 2)
    predictor = make_predictor(geometry, prefetch_distance=distance, embedding_size=3)
    literal = LiteralSearch(distance=distance)
    for iteration in range(6):
        maps = rng.dirichlet(np.ones(6) * 0.5, size=(2, num_layers)).astype(np.float32)
        embeddings = rng.normal(size=(2, 3)).astype(np.float32)
        made = predictor.iteration_started(fp.IterationContext(iteration, [1, 2], embeddings))
        expected = []
        if literal.maps:
            matches = [literal.semantic(embedding) for embedding in embeddings]
            expected.append((0, min(distance, num_layers), matches))
        for layer in range(num_layers):
            made += predictor.gate_observed(
                fp.GateObservation(layer, np.ascontiguousarray(maps[:, layer]))
            )
            if literal.maps and layer + distance < num_layers:
                matches = [literal.trajectory(row[: layer + 1]) for row in maps]
                expected.append((layer + distance, 1, matches))
        made += predictor.iteration_ended()
        assert len(made) == len(expected)
        for prediction, (first, count, matches) in zip(made, expected, strict=True):
            assert prediction.iteration == iteration
            assert (prediction.first_layer, prediction.num_layers) == (first, count)
            for row, (best, score) in enumerate(matches):
                assert prediction.score[row] == pytest.approx([score] * count, abs=1e-3)
                np.testing.assert_array_equal(
                    prediction.p[row], literal.maps[best][first : first + count]
                )
        for row in range(2):
            literal.add(maps[row], embeddings[row])


def test_a_row_that_is_not_finite_is_not_stored() -> None:
    predictor = make_predictor(fp.Geometry(1, 4, 1))
    predictor.iteration_started(fp.IterationContext(1, [1, 2]))
    predictor.gate_observed(
        fp.GateObservation(0, np.array([[0.5, np.nan, 0, 0], [1, 0, 0, 0]], np.float32))
    )
    predictor.iteration_ended()
    store = predictor.store()
    assert store is not None and store.size == 1


def test_a_step_that_failed_halfway_leaves_no_map() -> None:
    predictor = make_predictor(fp.Geometry(4, 6, 2))
    predictor.iteration_started(fp.IterationContext(1, [1]))
    predictor.gate_observed(fp.GateObservation(0, np.full((1, 6), 1 / 6, np.float32)))
    predictor.iteration_started(fp.IterationContext(2, [1]))
    for layer in range(4):
        predictor.gate_observed(fp.GateObservation(layer, np.full((1, 6), 1 / 6, np.float32)))
    predictor.iteration_ended()
    store = predictor.store()
    assert store is not None and store.size == 1


def test_iterations_of_a_request_are_linked_in_the_store() -> None:
    predictor = make_predictor(fp.Geometry(1, 4, 1))
    for iteration in range(3):
        predictor.iteration_started(
            fp.IterationContext(iteration, [7, 8], token_ids=[iteration, -1])
        )
        predictor.gate_observed(fp.GateObservation(0, np.full((2, 4), 0.25, np.float32)))
        predictor.iteration_ended()
        if iteration == 1:
            predictor.request_ended(8)
    store = predictor.store()
    assert store is not None
    assert store.predecessors().tolist() == [-1, -1, 0, 1, 2, -1]
    assert store.token_ids().tolist() == [0, -1, 1, -1, 2, -1]
