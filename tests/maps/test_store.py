"""The store against plain NumPy: paper 4.4, half precision, links."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.maps import OneByOne, as_stored, cosines, unit

from fmoe_ray.maps import EntryRef, MapStore

Floats = NDArray[np.float32]


def random_maps(rng: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    """Distributions with zeros, a zero map now and then, and repeated maps."""
    maps = rng.dirichlet(np.ones(shape[2]), size=shape[:2]).astype(np.float32)
    maps[rng.random(shape) < 0.3] = 0
    maps[rng.random(shape[0]) < 0.1] = 0
    if shape[0] > 2:
        maps[-1] = maps[0]
    return maps


def random_embeddings(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    embeddings = rng.normal(scale=10.0 ** rng.integers(-3, 4), size=shape).astype(np.float32)
    embeddings[rng.random(shape[0]) < 0.2] = 0
    return embeddings


def stored_maps(store: MapStore) -> Floats:
    return np.stack([store.entry(i).probs for i in range(len(store))])


def stored_embeddings(store: MapStore) -> Floats:
    return np.stack([store.entry(i).embedding for i in range(len(store))])


def make_store(capacity: int = 4, distance: int = 3, embedding_size: int = 5) -> MapStore:
    return MapStore(
        num_layers=3,
        num_experts=6,
        top_k=2,
        capacity=capacity,
        embedding_size=embedding_size,
        prefetch_distance=distance,
    )


sizes = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 5),
        "num_experts": st.sampled_from([1, 2, 7, 8, 9, 33, 130]),
        "capacity": st.sampled_from([1, 2, 5, 64, 65, 70]),
        "embedding_size": st.sampled_from([0, 1, 3, 64, 65, 300]),
        "prefetch_distance": st.integers(0, 7),
    }
)


def confusable(rng: np.random.Generator, vectors: Floats) -> Floats:
    """Among the vectors [n, ...] some that are equal, some of equal direction, and some that differ
    in the last bit of one number.
    """
    vectors = vectors[rng.integers(len(vectors), size=len(vectors))]
    scale = 2.0 ** rng.integers(-1, 2, size=(len(vectors), *[1] * (vectors.ndim - 1)))
    vectors = (vectors * scale).astype(np.float32)
    flat = vectors.reshape(len(vectors), -1)
    for row in np.flatnonzero(rng.random(len(flat)) < 0.3 * (flat.shape[1] > 0)):
        flat[row, rng.integers(flat.shape[1])] *= np.float32(1 + 2.0**-10)
    return vectors


@settings(deadline=None, max_examples=150)
@given(
    sizes,
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([1, 2, 7, 32, 64, 65, 150]), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_4_4_batches_go_where_plain_numpy_puts_their_maps_one_by_one(
    size: dict[str, Any], seed: int, batches: list[int], are_confusable: bool, are_unit: bool
) -> None:
    """To the same slots, exactly: also among ties, zero vectors and differences of 1e-7."""
    rng = np.random.default_rng(seed)
    store = MapStore(**size, top_k=1)
    expected = OneByOne(capacity=size["capacity"], distance=size["prefetch_distance"])
    for num_new in batches:
        maps = random_maps(rng, (num_new, size["num_layers"], size["num_experts"]))
        embeddings = random_embeddings(rng, (num_new, size["embedding_size"]))
        if are_confusable:
            maps, embeddings = confusable(rng, maps), confusable(rng, embeddings)
        if are_unit:  # as they come from another store
            embeddings = np.stack([as_stored(unit(row)) for row in embeddings]).astype(np.float32)
        refs = store.native.insert(maps, embeddings, None, None, [], are_unit)
        assert [ref.index for ref in refs] == [
            expected.insert(*new, is_unit=are_unit) for new in zip(maps, embeddings, strict=True)
        ]
    assert np.array_equal(stored_maps(store), np.stack(expected.maps))
    assert np.array_equal(stored_embeddings(store), np.stack(expected.embeddings))
    store.native.check_integrity()


def test_4_4_rdy_formula() -> None:
    store = make_store(distance=1)
    assert store.redundancy(0.9, 0.3) == pytest.approx(1 / 3 * 0.9 + 2 / 3 * 0.3)


def test_4_4_rdy_clips_the_distance_to_the_layers() -> None:
    assert make_store(distance=9).redundancy(0.9, 0.3) == pytest.approx(0.9)


def test_4_4_equally_redundant_entries_fall_to_the_lower_index() -> None:
    store = make_store(capacity=3, embedding_size=0)
    same = np.full((3, 3, 6), 1 / 6, np.float32)
    store.insert(same)
    (ref,) = store.insert(same[:1])
    assert ref.index == 0


def test_without_embeddings_redundancy_rests_on_the_maps_alone() -> None:
    store = make_store(capacity=2, distance=1, embedding_size=0)
    maps = np.random.default_rng(1).dirichlet(np.ones(6), size=(2, 3)).astype(np.float32)
    store.insert(maps)
    (ref,) = store.insert(maps[1:])
    assert ref.index == 1


@settings(deadline=None, max_examples=25)
@given(sizes, st.integers(0, 2**32 - 1))
def test_4_2_semantic_scores_are_cosines_of_embeddings(size: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = MapStore(**size, top_k=1)
    count = size["capacity"]
    embeddings = random_embeddings(rng, (count, size["embedding_size"]))
    store.insert(
        random_maps(rng, (count, size["num_layers"], size["num_experts"])), embeddings=embeddings
    )
    for query in random_embeddings(rng, (3, size["embedding_size"])):
        expected = cosines(query, stored_embeddings(store))
        np.testing.assert_allclose(store.semantic_scores(query), expected, atol=2e-6)


def test_a_stored_map_is_no_more_similar_to_itself_than_1() -> None:
    rng = np.random.default_rng(3)
    store = make_store(capacity=50)
    maps, embeddings = random_maps(rng, (50, 3, 6)), random_embeddings(rng, (50, 5))
    store.insert(maps, embeddings=embeddings)
    for i in range(50):
        itself = store.entry(i)
        assert store.map_scores(itself.probs)[i] <= 1 + 1e-6
        assert store.semantic_scores(itself.embedding)[i] <= 1 + 1e-6


small, large = st.floats(0, 2.0**-13, width=32), st.floats(0, 2.0**100, width=32)


@given(st.lists(small | large, min_size=18, max_size=18))
def test_probabilities_are_stored_as_the_nearest_half(values: list[float]) -> None:
    store = make_store()
    maps = np.array(values, np.float32).reshape(1, 3, 6)
    store.insert(maps)
    assert np.array_equal(store.entry(0).probs, as_stored(maps[0]).astype(np.float32))


@pytest.mark.parametrize("bad", [-0.1, np.nan, np.inf])
def test_an_improper_probability_is_refused_before_anything_changes(bad: float) -> None:
    store = make_store()
    maps = np.full((2, 3, 6), 0.5, np.float32)
    maps[1, 2, 4] = bad
    with pytest.raises(ValueError, match=r"layer 2, expert 4"):
        store.insert(maps)
    assert len(store) == 0


def test_links_join_iterations_of_a_request_until_one_is_replaced() -> None:
    store = make_store(capacity=3, distance=1, embedding_size=0)
    maps = np.eye(6, dtype=np.float32)[None, :3].repeat(4, axis=0)
    maps[1] = np.roll(maps[1], 1, axis=1)
    maps[2] = np.roll(maps[2], 2, axis=1)
    (first,) = store.insert(maps[:1])
    (second,) = store.insert(maps[1:2], predecessors=[first])
    (third,) = store.insert(maps[2:3], predecessors=[second])
    assert store.entry(1).predecessor == 0 and store.entry(1).successor == 2
    (again,) = store.insert(maps[1:2], predecessors=[third])
    assert again.index == 1
    assert not store.is_current(second) and store.is_current(again)
    assert store.entry(0).successor is None
    assert store.entry(2).predecessor is None and store.entry(2).successor == 1
    store.native.check_integrity()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_links_never_name_a_replaced_entry(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = make_store(capacity=6, embedding_size=0)
    last: dict[int, EntryRef] = {}
    owner: dict[tuple[int, int], tuple[int, int]] = {}  # (index, generation) -> request, iteration
    for iteration in range(40):
        request = int(rng.integers(3))
        previous = [last[request]] if request in last else []
        (ref,) = store.insert(random_maps(rng, (1, 3, 6)), predecessors=previous)
        last[request] = ref
        owner[ref.index, ref.generation] = (request, iteration)
        for i in range(len(store)):
            entry, here = store.entry(i), store.ref(i)
            if entry.successor is not None:
                there = store.ref(entry.successor)
                mine = owner[here.index, here.generation]
                theirs = owner[there.index, there.generation]
                assert mine[0] == theirs[0] and mine[1] < theirs[1]
                assert store.entry(entry.successor).predecessor == i
    store.native.check_integrity()


def test_chosen_experts_and_token_are_kept() -> None:
    rng = np.random.default_rng(4)
    store = make_store(capacity=8)
    maps = random_maps(rng, (8, 3, 6))
    chosen = rng.random(maps.shape) < 0.4
    store.insert(maps, chosen=chosen, token_ids=np.arange(8, dtype=np.int32) - 1)
    for i in range(8):
        assert np.array_equal(store.entry(i).chosen, chosen[i])
        assert store.entry(i).token_id == i - 1
        assert not store.entry(i).embedding.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"embedding_size": -1}, "embedding_size"),
        ({"top_k": 7}, "top_k"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    shape: dict[str, Any] = {"num_layers": 3, "num_experts": 6, "top_k": 2, "capacity": 4}
    shape |= changes
    with pytest.raises(ValueError, match=message):
        MapStore(**shape)


def test_arrays_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"probs must be \[1, 3, 6\], got \[1, 3, 5\]"):
        make_store().insert(np.zeros((1, 3, 5), np.float32))


def test_figure_16_32k_maps_of_the_papers_models_stay_under_200_mb() -> None:
    for num_layers, num_experts in ((32, 8), (24, 60), (32, 16)):
        store = MapStore(num_layers=num_layers, num_experts=num_experts, top_k=2, capacity=32_000)
        assert store.map_bytes < 200e6
