"""The incremental search against a full recomputation: paper 4.2."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.maps import cosines

from fmoe_ray.errors import EngineError
from fmoe_ray.maps import MapStore, Matcher

Floats = NDArray[np.float32]


def filled_store(
    rng: np.random.Generator, *, capacity: int, num_layers: int, num_experts: int, h: int = 0
) -> MapStore:
    store = MapStore(
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=1,
        capacity=capacity,
        embedding_size=h,
    )
    maps = gates(rng, capacity, num_layers, num_experts)
    store.insert(maps, embeddings=rng.normal(size=(capacity, h)).astype(np.float32))
    return store


def gates(rng: np.random.Generator, count: int, num_layers: int, num_experts: int) -> Floats:
    """Sparse distributions; whole layers and whole maps may be zero."""
    probs = rng.dirichlet(np.ones(num_experts) * 0.5, size=(count, num_layers))
    probs[rng.random(probs.shape) < 0.3] = 0
    probs[rng.random((count, num_layers)) < 0.1] = 0
    probs[rng.random(count) < 0.1] = 0
    return probs.astype(np.float32)


def stored_maps(store: MapStore) -> Floats:
    return np.stack([store.entry(i).probs for i in range(len(store))])


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    capacity=st.sampled_from([1, 2, 63, 64, 65, 130]),
    num_layers=st.integers(1, 5),
    num_experts=st.sampled_from([1, 3, 8, 17, 64]),
    num_rows=st.integers(1, 3),
)
def test_4_2_trajectory_scores_equal_a_full_recomputation(
    seed: int, capacity: int, num_layers: int, num_experts: int, num_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    store = filled_store(rng, capacity=capacity, num_layers=num_layers, num_experts=num_experts)
    stored = stored_maps(store)
    matcher = Matcher(store)
    for _ in range(2):  # a second iteration starts afresh
        queries = gates(rng, num_rows, num_layers, num_experts)
        matcher.start(num_rows=num_rows)
        for layer in range(num_layers):
            matcher.observe(layer, np.ascontiguousarray(queries[:, layer]))
            scores = matcher.trajectory_scores()
            for row in range(num_rows):
                prefix = queries[row, : layer + 1]
                expected = cosines(prefix, stored[:, : layer + 1])
                np.testing.assert_allclose(scores[row], expected, atol=2e-6)
                best = matcher.best_trajectory(row)
                if prefix.any():
                    assert expected[best.entry] == pytest.approx(expected.max(), abs=4e-6)
                    assert best.score == pytest.approx(expected.max(), abs=4e-6)
                else:
                    assert (best.entry, best.score) == (-1, 0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), num_columns=st.integers(1, 9))
def test_a_truncated_search_compares_the_most_probable_experts_only(
    seed: int, num_columns: int
) -> None:
    rng = np.random.default_rng(seed)
    store = filled_store(rng, capacity=70, num_layers=4, num_experts=9)
    stored = stored_maps(store).astype(np.float64)
    query = gates(rng, 1, 4, 9)[0]
    matcher, exact = Matcher(store, num_columns=num_columns), Matcher(store)
    for search in (matcher, exact):
        search.start(num_rows=1)
    kept = np.zeros_like(query)
    for layer in range(4):
        top = np.argsort(-query[layer], kind="stable")[:num_columns]
        kept[layer, top] = query[layer, top]
        for search in (matcher, exact):
            search.observe(layer, query[layer : layer + 1])
        dots = np.einsum("nlj,lj->n", stored[:, : layer + 1], kept[: layer + 1])
        norms = np.linalg.norm(stored[:, : layer + 1].reshape(70, -1), axis=1)
        norms = norms * np.linalg.norm(query[: layer + 1])
        expected = np.divide(dots, norms, out=np.zeros(70), where=norms > 0)
        np.testing.assert_allclose(matcher.trajectory_scores()[0], expected, atol=2e-6)
        assert (matcher.trajectory_scores() <= exact.trajectory_scores() + 2e-6).all()


def test_equal_maps_fall_to_the_lower_index() -> None:
    store = MapStore(num_layers=2, num_experts=5, top_k=1, capacity=130)
    probs = np.random.default_rng(0).dirichlet(np.ones(5), size=(1, 2)).astype(np.float32)
    store.insert(probs.repeat(130, axis=0))
    matcher = Matcher(store)
    matcher.start(num_rows=1)
    matcher.observe(0, probs[:, 0])
    assert matcher.best_trajectory(0).entry == 0
    assert [match.entry for match in matcher.nearest_trajectory(0, 4)] == [0, 1, 2, 3]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 90))
def test_nearest_are_the_n_best_scores_in_order(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    store = filled_store(rng, capacity=70, num_layers=3, num_experts=6, h=4)
    matcher = Matcher(store)
    matcher.start(num_rows=1, embeddings=np.ones((1, 4), np.float32))
    matcher.observe(0, np.full((1, 6), 1 / 6, np.float32))
    for scores, nearest in (
        (matcher.trajectory_scores()[0], matcher.nearest_trajectory(0, n)),
        (matcher.semantic_scores()[0], matcher.nearest_semantic(0, n)),
    ):
        order = np.lexsort((np.arange(70), -scores))[:n]
        assert [match.entry for match in nearest] == order.tolist()
        assert [match.score for match in nearest] == scores[order].tolist()


def test_4_2_semantic_match_is_the_entry_of_the_most_similar_embedding() -> None:
    rng = np.random.default_rng(1)
    store = filled_store(rng, capacity=20, num_layers=2, num_experts=4, h=6)
    embeddings = np.stack([store.entry(7).embedding * 100, store.entry(3).embedding])
    matcher = Matcher(store)
    matcher.start(num_rows=2, embeddings=embeddings)
    assert [matcher.best_semantic(row).entry for row in range(2)] == [7, 3]
    assert matcher.best_semantic(0).score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("embeddings", [None, np.zeros((1, 6), np.float32)])
def test_nothing_matches_semantically_without_an_embedding(embeddings: Floats | None) -> None:
    store = filled_store(np.random.default_rng(1), capacity=20, num_layers=2, num_experts=4, h=6)
    matcher = Matcher(store)
    matcher.start(num_rows=1, embeddings=embeddings)
    assert matcher.best_semantic(0).entry == -1
    assert matcher.nearest_semantic(0, 3) == []
    assert not matcher.semantic_scores().any()


def test_an_empty_store_matches_nothing() -> None:
    store = MapStore(num_layers=2, num_experts=4, top_k=1, capacity=3, embedding_size=2)
    matcher = Matcher(store)
    matcher.start(num_rows=1, embeddings=np.ones((1, 2), np.float32))
    matcher.observe(0, np.full((1, 4), 0.25, np.float32))
    assert matcher.best_semantic(0).entry == matcher.best_trajectory(0).entry == -1
    assert matcher.trajectory_scores().shape == (1, 0)


def test_a_store_that_changed_makes_the_search_stale() -> None:
    store = filled_store(np.random.default_rng(2), capacity=3, num_layers=2, num_experts=4)
    matcher = Matcher(store)
    matcher.start(num_rows=1)
    matcher.observe(0, np.full((1, 4), 0.25, np.float32))
    store.insert(np.full((1, 2, 4), 0.25, np.float32))
    with pytest.raises(EngineError, match="version"):
        matcher.best_trajectory(0)


def test_layers_out_of_order_are_refused() -> None:
    matcher = Matcher(
        filled_store(np.random.default_rng(2), capacity=3, num_layers=2, num_experts=4)
    )
    matcher.start(num_rows=1)
    with pytest.raises(EngineError, match="layer"):
        matcher.observe(1, np.full((1, 4), 0.25, np.float32))


def test_a_vote_weighs_neighbours_by_softmax_of_their_scores() -> None:
    rng = np.random.default_rng(3)
    store = MapStore(num_layers=3, num_experts=5, top_k=2, capacity=12)
    maps = gates(rng, 12, 3, 5)
    chosen = rng.random(maps.shape) < 0.4
    store.insert(maps, chosen=chosen)
    matcher = Matcher(store)
    matcher.start(num_rows=1)
    matcher.observe(0, np.full((1, 5), 0.2, np.float32))
    nearest = matcher.nearest_trajectory(0, 4)
    weights = np.exp(8 * np.array([match.score for match in nearest]))
    weights /= weights.sum()
    entries = [match.entry for match in nearest]
    for ballot, values in (("probs", stored_maps(store)), ("chosen", chosen)):
        voted = matcher.vote(
            nearest,
            first_layer=1,
            num_layers=2,
            sharpness=8,
            on="probs" if ballot == "probs" else "chosen",
        )
        expected = np.einsum("n,nlj->lj", weights, values[entries, 1:])
        np.testing.assert_allclose(voted, expected, atol=1e-6)
    assert not matcher.vote([], first_layer=0, num_layers=3).any()
