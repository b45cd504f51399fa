"""Maps under their names: one map is stored once, whatever way it comes."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ray.maps.named import NO_NAME, NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore

L, J, H = 3, 4, 5


def new_store(capacity: int) -> NamedStore:
    return NamedStore(
        MapStore(num_layers=L, num_experts=J, top_k=2, capacity=capacity, embedding_size=H)
    )


def learn(named: NamedStore, seed: int, num_maps: int = 1) -> None:
    """As a predictor does: chained maps, stored without their names."""
    random = np.random.default_rng(seed)
    previous = None
    for number in range(num_maps):
        (previous,) = named.store.insert(
            random.dirichlet(np.ones(J), (1, L)).astype(np.float32),
            embeddings=random.normal(size=(1, H)).astype(np.float32),
            chosen=random.random((1, L, J)) < 0.5,
            token_ids=np.array([number], np.int32),
            predecessors=() if previous is None else (previous,),
        )


def everything(named: NamedStore) -> NamedMaps:
    named.refresh()
    return named.read(sorted(named.names))


def by_name(maps: NamedMaps) -> dict[int, tuple[object, ...]]:
    return {
        int(maps.names[i]): (
            int(maps.predecessors[i]),
            maps.probs[i].tobytes(),
            maps.embeddings[i].tobytes(),
            maps.chosen[i].tobytes(),
            int(maps.token_ids[i]),
        )
        for i in range(len(maps))
    }


def test_a_copy_holds_the_same_bits_and_links() -> None:
    first, second = new_store(20), new_store(20)
    learn(first, 1, 7)
    maps = everything(first)
    assert (maps.predecessors == NO_NAME).sum() == 1
    assert len(second.insert(maps)) == 7
    assert by_name(everything(second)) == by_name(maps)
    second.check_integrity()


def test_links_are_kept_across_batches() -> None:
    first, second = new_store(20), new_store(20)
    learn(first, 1, 6)
    maps = everything(first)
    second.insert(maps[:4])
    second.insert(maps[4:])
    assert by_name(everything(second)) == by_name(maps)


def test_what_is_stored_already_is_not_stored_again() -> None:
    first, second = new_store(20), new_store(20)
    learn(first, 1, 3)
    maps = everything(first)
    second.insert(maps)
    learn(first, 2, 2)
    fresh = second.insert(NamedMaps.concatenate([everything(first), maps, everything(first)]))
    assert len(fresh) == 2
    assert len(second.store) == 5
    assert not set(fresh.names.tolist()) & set(maps.names.tolist())


def test_names_of_replaced_maps_are_forgotten() -> None:
    named = new_store(4)
    learn(named, 1, 4)
    before = everything(named)
    learn(named, 2, 3)
    after = everything(named)
    assert len(named.names) == 4 == len(after)
    assert set(before.names.tolist()) != named.names
    named.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(["learn", "merge", "back"]), st.integers(0, 5)), max_size=12)
)
def test_names_always_tell_what_is_stored(steps: Sequence[tuple[str, int]]) -> None:
    ours, theirs = new_store(6), new_store(4)
    for action, seed in steps:
        if action == "learn":
            learn(ours, seed, 1 + seed % 3)
        else:
            to, source = (theirs, ours) if action == "merge" else (ours, theirs)
            maps = everything(source)
            to.refresh()
            to.insert(maps)
        for named in (ours, theirs):
            named.refresh()
            named.check_integrity()


def test_a_map_of_another_shape_is_refused_and_nothing_changes() -> None:
    named = new_store(4)
    other = NamedStore(MapStore(num_layers=L, num_experts=J + 1, top_k=2, capacity=4))
    other.store.insert(np.full((1, L, J + 1), 0.2, np.float32))
    with pytest.raises(ValueError, match="probs must be"):
        named.insert(everything(other))
    named.check_integrity()
    assert len(named.store) == 0
