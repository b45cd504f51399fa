"""Several writers of one file of maps: nothing is lost, and nobody waits for ever."""

from pathlib import Path

import numpy as np
import pytest

from fmoe_ray.errors import FingerprintError, StoreError
from fmoe_ray.maps.file_lock import lock_beside
from fmoe_ray.maps.map_file import MapFile
from fmoe_ray.maps.named import NamedStore
from fmoe_ray.maps.store import MapStore

L, J = 3, 4


def new_store(seed: int, num_maps: int, capacity: int = 50, fingerprint: str = "m") -> NamedStore:
    store = MapStore(
        num_layers=L, num_experts=J, top_k=2, capacity=capacity, fingerprint=fingerprint
    )
    random = np.random.default_rng(seed)
    store.insert(random.dirichlet(np.ones(J), (num_maps, L)).astype(np.float32))
    return NamedStore(store)


def open_file(path: Path, timeout_s: float = 5.0) -> MapFile:
    return MapFile(path, lock_timeout_s=timeout_s)


def names_in(path: Path) -> set[int]:
    return NamedStore(MapStore.load(path)).names


def test_what_two_writers_save_in_turn_is_all_there(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    mine, theirs = new_store(1, 3), new_store(2, 4)
    my_file, their_file = open_file(path), open_file(path)
    assert len(my_file.save(mine)) == 0
    wanted = mine.names | theirs.names
    assert set(their_file.save(theirs).names.tolist()) == wanted - new_store(2, 4).names
    assert names_in(path) == wanted
    assert set(my_file.save(mine).names.tolist()) == wanted - new_store(1, 3).names
    assert names_in(path) == mine.names == theirs.names == wanted


def test_a_map_that_was_replaced_on_purpose_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    store = new_store(1, 4, capacity=4)
    file = open_file(path)
    file.save(store)
    store.insert(new_store(2, 2).read(sorted(new_store(2, 2).names)))
    kept = store.names
    MapStore.load(path).save(path)  # by another writer, with nothing new
    assert len(file.save(store)) == 0
    assert names_in(path) == kept


def test_a_file_is_read_into_a_store_of_less_room(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    open_file(path).save(new_store(1, 9))
    small = new_store(2, 0, capacity=4)
    file = open_file(path)
    file.read_into(small.store)
    small.refresh()
    assert len(file.save(small)) == 0
    assert names_in(path) == small.names


def test_a_locked_file_is_waited_for_and_named(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    with (
        lock_beside(path, timeout_s=1),
        pytest.raises(StoreError, match=r"maps: another process has been writing it for 0\.1 s"),
    ):
        open_file(path, timeout_s=0.1).save(new_store(1, 3))
    assert not path.exists()


def test_the_file_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    other = new_store(1, 3, fingerprint="n")
    open_file(path).save(other)
    with pytest.raises(FingerprintError):
        open_file(path).save(new_store(2, 3))
    assert names_in(path) == other.names
