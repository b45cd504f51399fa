"""A store on disk: the same after loading, and refused where it is wrong."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from fmoe_ray.errors import FingerprintError, StoreError
from fmoe_ray.maps import EntryRef, MapStore
from fmoe_ray.maps.store_file import read_header, write_store


def make_store(**changes: Any) -> MapStore:
    shape: dict[str, Any] = {
        "num_layers": 3,
        "num_experts": 6,
        "top_k": 2,
        "capacity": 8,
        "embedding_size": 5,
        "prefetch_distance": 2,
        "fingerprint": "model-a",
    }
    return MapStore(**(shape | changes))


def fill(store: MapStore, *, num_maps: int, seed: int = 0) -> None:
    """One request's iterations, linked, plus embeddings, choices and tokens."""
    rng = np.random.default_rng(seed)
    h = store.header.embedding_size
    last: list[EntryRef] = []
    for i in range(num_maps):
        probs = rng.dirichlet(np.ones(6), size=(1, 3)).astype(np.float32)
        last = store.insert(
            probs,
            embeddings=rng.normal(size=(1, h)).astype(np.float32) * 1e-3,
            chosen=probs > 0.2,
            token_ids=np.array([i], np.int32),
            predecessors=last,
        )


def assert_same(a: MapStore, b: MapStore) -> None:
    assert a.header == b.header
    for i in range(len(a)):
        mine, other = a.entry(i), b.entry(i)
        assert np.array_equal(mine.probs, other.probs)
        assert np.array_equal(mine.embedding, other.embedding)
        assert np.array_equal(mine.chosen, other.chosen)
        assert (mine.token_id, mine.predecessor, mine.successor) == (
            other.token_id,
            other.predecessor,
            other.successor,
        )


@pytest.mark.parametrize("num_maps", [0, 1, 8, 20])
def test_a_loaded_store_is_the_saved_one_to_the_bit(tmp_path: Path, num_maps: int) -> None:
    store = make_store()
    fill(store, num_maps=num_maps)
    store.save(tmp_path / "maps")
    loaded = MapStore.load(tmp_path / "maps", like=store)
    assert_same(loaded, store)
    loaded.native.check_integrity()
    query = np.random.default_rng(9).normal(size=5).astype(np.float32)
    assert np.array_equal(loaded.semantic_scores(query), store.semantic_scores(query))


def test_a_loaded_store_learns_on_as_the_saved_one_would(tmp_path: Path) -> None:
    store = make_store()
    fill(store, num_maps=12)
    store.save(tmp_path / "maps")
    loaded = MapStore.load(tmp_path / "maps")
    fill(store, num_maps=5, seed=1)
    fill(loaded, num_maps=5, seed=1)
    assert_same(loaded, store)


def test_saving_leaves_no_other_file_and_replaces_the_old_one(tmp_path: Path) -> None:
    store = make_store()
    store.save(tmp_path / "deep" / "maps")
    fill(store, num_maps=3)
    store.save(tmp_path / "deep" / "maps")
    assert os.listdir(tmp_path / "deep") == ["maps"]
    assert len(MapStore.load(tmp_path / "deep" / "maps")) == 3


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/maps: cannot be written"):
        make_store().save(tmp_path / "file" / "maps")


def test_a_store_of_another_model_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    make_store().save(tmp_path / "maps")
    with pytest.raises(FingerprintError, match=r"'model-a', needed 'model-b'") as refused:
        MapStore.load(tmp_path / "maps", like=make_store(fingerprint="model-b"))
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "was"),
    [
        ("num_layers", 4, 3),
        ("num_experts", 7, 6),
        ("top_k", 3, 2),
        ("embedding_size", 0, 5),
        ("prefetch_distance", 3, 2),
    ],
)
def test_a_store_of_another_shape_is_refused_with_both_values(
    tmp_path: Path, name: str, value: int, was: int
) -> None:
    make_store().save(tmp_path / "maps")
    with pytest.raises(StoreError, match=rf"{name} is {was}, needed {value}"):
        MapStore.load(tmp_path / "maps", like=make_store(**{name: value}))


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    store = make_store()
    fill(store, num_maps=8)
    store.save(tmp_path / "maps")
    whole = (tmp_path / "maps").read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "maps").write_bytes(whole[:length])
        with pytest.raises(StoreError, match="maps: "):
            MapStore.load(tmp_path / "maps")


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    store = make_store()
    fill(store, num_maps=8)
    store.save(tmp_path / "maps")
    whole = (tmp_path / "maps").read_bytes()
    content = 8 + int.from_bytes(whole[:8], "little")
    for position in [*range(content), *range(content, len(whole), 37)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (tmp_path / "maps").write_bytes(damaged)
        with pytest.raises(StoreError, match="checksum" if position >= content else None):
            MapStore.load(tmp_path / "maps")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "something", "format is 'something'"),
        ("version", "99", "version '99', this program reads 2"),
        ("header", "{", "damaged header"),
        ("header", '{"fingerprint": 1}', "damaged header"),
        ("header", "[]", "damaged header"),
        ("header", "[" * 100_000, "damaged header"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    path = tmp_path / "maps"
    make_store().save(path)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() | {key: value}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_file(tensors, path, metadata)
    with pytest.raises(StoreError, match=message):
        MapStore.load(path)


def edit_header(path: Path, **changes: object) -> None:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    header = json.loads(metadata["header"]) | changes
    save_file(tensors, path, metadata | {"header": json.dumps(header)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 2}, "its header asks for"),
        ({"capacity": -1}, "damaged header: capacity is -1"),
        ({"capacity": 2**40}, "damaged header: capacity is"),
        ({"capacity": 9}, "do not have the file's checksum"),
        ({"prefetch_distance": 3}, "do not have the file's checksum"),
        ({"fingerprint": "model-b"}, "do not have the file's checksum"),
    ],
)
def test_a_changed_header_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "maps"
    make_store().save(path)
    edit_header(path, **changes)
    with pytest.raises(StoreError, match=message):
        MapStore.load(path)


@pytest.mark.parametrize("changes", [{"capacity": 0}, {"top_k": 9}])
def test_a_header_of_no_possible_store_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With the right checksum, as another program may write it."""
    path, store = tmp_path / "maps", make_store()
    write_store(path, replace(store.header, **changes), store.read(0, 0))
    with pytest.raises(StoreError, match="maps: "):
        MapStore.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere: cannot be read"):
        MapStore.load(tmp_path / "nowhere")


def test_the_header_alone_can_be_read(tmp_path: Path) -> None:
    store = make_store()
    fill(store, num_maps=3)
    store.save(tmp_path / "maps")
    assert read_header(tmp_path / "maps") == store.header


def test_merging_keeps_maps_and_links_while_there_is_room() -> None:
    first, second = make_store(capacity=16), make_store()
    fill(first, num_maps=3)
    fill(second, num_maps=4, seed=1)
    first.merge(second)
    assert len(first) == 7
    assert [first.entry(i).predecessor for i in range(7)] == [None, 0, 1, None, 3, 4, 5]
    assert np.array_equal(first.entry(5).probs, second.entry(2).probs)
    assert np.array_equal(first.entry(5).embedding, second.entry(2).embedding)


def test_merging_a_store_into_its_full_copy_changes_no_map() -> None:
    """Every map's most redundant entry is itself."""
    store = make_store(prefetch_distance=1)
    fill(store, num_maps=8)
    copy = store.copy(capacity=8)
    copy.merge(store)
    for i in range(8):
        assert np.array_equal(copy.entry(i).probs, store.entry(i).probs)


def test_merging_another_models_store_is_refused() -> None:
    with pytest.raises(FingerprintError, match="'model-b', needed 'model-a'"):
        make_store().merge(make_store(fingerprint="model-b"))


def test_a_smaller_copy_is_what_inserting_into_it_gives() -> None:
    store = make_store(capacity=20)
    fill(store, num_maps=20)
    small, expected = store.copy(capacity=6), make_store(capacity=6)
    fill(expected, num_maps=20)
    assert len(small) == 6
    for i in range(6):
        assert small.entry(i).token_id == expected.entry(i).token_id
    small.native.check_integrity()
