"""The shared store without Ray: what it takes, publishes, keeps and refuses."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fmoe_ray.actors.map_store import (
    MAX_SEGMENTS,
    PUBLISH_EVERY_S,
    SAVE_EVERY_S,
    TAKE_FOR_S,
    ExpertMapStore,
    Segments,
)
from fmoe_ray.engine.map_exchange import Version
from fmoe_ray.errors import FingerprintError, StoreError
from fmoe_ray.maps.file_lock import lock_beside
from fmoe_ray.maps.named import NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore

L, J, H = 3, 4, 5


def new_maps(seed: int, num_maps: int) -> NamedMaps:
    random = np.random.default_rng(seed)
    named = NamedStore(
        MapStore(num_layers=L, num_experts=J, top_k=2, capacity=num_maps, embedding_size=H)
    )
    named.store.insert(
        random.dirichlet(np.ones(J), (num_maps, L)).astype(np.float32),
        embeddings=random.normal(size=(num_maps, H)).astype(np.float32),
        token_ids=np.arange(num_maps, dtype=np.int32),
    )
    named.refresh()
    return named.read(sorted(named.names))


NOTHING = new_maps(0, 1)[:0]
HEADER = MapStore(
    num_layers=L, num_experts=J, top_k=2, capacity=50, embedding_size=H, fingerprint="tiny"
).header


class Stores:
    """Opens stores on one clock; what they put stays as it is."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def open(self, path: Path | None = None, **header: object) -> ExpertMapStore:
        changed = dataclasses.replace(HEADER, **header)  # type: ignore[arg-type]
        return ExpertMapStore(
            changed,
            None if path is None else str(path),
            put=lambda maps: maps,
            clock=lambda: self.time_s,
        )

    def sync(
        self, store: ExpertMapStore, maps: NamedMaps = NOTHING, since: Version | None = None
    ) -> Segments:
        self.time_s += PUBLISH_EVERY_S
        segments = store.sync("reader", maps, since or Version())
        store.check_integrity()
        return segments


@pytest.fixture
def stores() -> Stores:
    return Stores()


def names(segments: Segments) -> list[int]:
    return [name for maps in segments.refs for name in maps.names.tolist()]


def test_a_reader_gets_what_came_since_its_version(stores: Stores) -> None:
    store = stores.open()
    first = stores.sync(store, new_maps(1, 4))
    second = stores.sync(store, new_maps(2, 3), first.version)
    assert sorted(names(first)) == sorted(new_maps(1, 4).names)
    assert sorted(names(second)) == sorted(new_maps(2, 3).names)
    assert stores.sync(store, NOTHING, second.version).refs == []
    assert len(names(stores.sync(store))) == 7


def test_publications_are_rate_limited_and_lose_nothing(stores: Stores) -> None:
    store = stores.open()
    version = stores.sync(store, new_maps(1, 1)).version
    hurried = store.sync("reader", new_maps(2, 2), version)
    assert (hurried.version, hurried.refs) == (version, [])
    assert len(names(stores.sync(store, new_maps(3, 1), version))) == 3


def test_many_segments_become_one_snapshot_that_serves_old_readers_too(stores: Stores) -> None:
    store = stores.open()
    old = stores.sync(store, new_maps(0, 1)).version
    for seed in range(1, MAX_SEGMENTS + 2):
        stores.sync(store, new_maps(seed, 1))
        assert store.info().num_segments <= MAX_SEGMENTS
    assert store.info().num_segments < 4
    assert set(names(stores.sync(store, NOTHING, old))) == store.names
    assert len(store.names) == MAX_SEGMENTS + 2


def test_published_segments_never_change(stores: Stores) -> None:
    store = stores.open(capacity=4)
    (segment,) = stores.sync(store, new_maps(1, 4)).refs
    before = segment.probs.tobytes()
    stores.sync(store, new_maps(2, 4))
    assert segment.probs.tobytes() == before


def test_a_version_of_another_life_gets_everything(stores: Stores, tmp_path: Path) -> None:
    path = tmp_path / "maps"
    store = stores.open(path)
    version = stores.sync(store, new_maps(1, 4)).version
    store.save()
    again = stores.open(path)
    assert again.names == store.names
    update = stores.sync(again, NOTHING, version)
    assert update.version.life != version.life
    assert set(names(update)) == store.names


def test_maps_are_saved_as_time_goes_by(stores: Stores, tmp_path: Path) -> None:
    path = tmp_path / "maps"
    store = stores.open(path)
    stores.sync(store, new_maps(1, 4))
    assert len(MapStore.load(path)) == 0
    stores.time_s += SAVE_EVERY_S
    stores.sync(store)
    assert len(MapStore.load(path)) == 4


def test_what_others_save_is_kept_and_published(stores: Stores, tmp_path: Path) -> None:
    path = tmp_path / "maps"
    store = stores.open(path)
    version = stores.sync(store, new_maps(1, 4)).version
    other = stores.open(path)
    stores.sync(other, new_maps(2, 3))
    other.save()
    store.save()
    wanted = set(new_maps(1, 4).names.tolist()) | set(new_maps(2, 3).names.tolist())
    assert NamedStore(MapStore.load(path)).names == wanted
    assert set(names(stores.sync(store, NOTHING, version))) == set(new_maps(2, 3).names.tolist())


def test_a_file_that_others_write_is_saved_later(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "maps"
    store = stores.open(path)
    stores.sync(store, new_maps(1, 4))
    for spoil in (
        lock_beside(path, timeout_s=1),
        replaced(path, fingerprint="other"),
    ):
        with spoil:
            stores.time_s += SAVE_EVERY_S
            stores.sync(store)
    assert caplog.text.count("could not be saved") == 2
    stores.time_s += SAVE_EVERY_S
    stores.sync(store)
    assert len(MapStore.load(path)) == 4


@contextmanager
def replaced(path: Path, **header: object) -> Iterator[None]:
    """Another model's file in the place of this one."""
    own = path.read_bytes()
    changed = dataclasses.replace(HEADER, **header)  # type: ignore[arg-type]
    MapStore.empty(changed, capacity=9).save(path)
    yield
    path.write_bytes(own)


def test_duplicates_are_counted_and_not_published(stores: Stores) -> None:
    store = stores.open()
    version = stores.sync(store, new_maps(1, 4)).version
    assert stores.sync(store, new_maps(1, 4), version).refs == []
    info = store.info()
    assert (info.num_received, info.num_duplicates, info.header.size) == (8, 4, 4)
    assert info.readers == {"reader": version}


def test_a_store_of_another_model_is_refused(stores: Stores, tmp_path: Path) -> None:
    store = stores.open()
    store.join(HEADER)
    with pytest.raises(FingerprintError, match="maps of model 'tiny', needed 'other'"):
        store.join(dataclasses.replace(HEADER, fingerprint="other"))
    with pytest.raises(StoreError, match="num_experts is 4, needed 8"):
        store.join(dataclasses.replace(HEADER, num_experts=8))
    path = tmp_path / "maps"
    stores.open(path, fingerprint="other").save()
    with pytest.raises(FingerprintError, match="maps of model 'other', needed 'tiny'"):
        stores.open(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"no maps"), "damaged or no expert-map store"),
        (lambda path: path.mkdir(), "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_at_once(
    spoil: Callable[[Path], object], message: str, stores: Stores, tmp_path: Path
) -> None:
    path = tmp_path / "maps"
    spoil(path)
    with pytest.raises(StoreError, match=message):
        stores.open(path)


def test_maps_of_another_shape_are_refused(stores: Stores) -> None:
    store = stores.open(num_experts=8)
    with pytest.raises(StoreError, match="refused"):
        stores.sync(store, new_maps(1, 1))


def test_clients_find_the_map_they_ask_for_by_either_search(stores: Stores) -> None:
    store = stores.open()
    maps = new_maps(1, 9)
    stores.sync(store, maps)
    (found,) = store.match(probs=maps.probs[5, :2].astype(np.float32))
    np.testing.assert_array_equal(found.probs, maps.probs[5].astype(np.float32))
    assert found.score == pytest.approx(1, abs=1e-3)
    best, second = store.match(embedding=maps.embeddings[3].astype(np.float32), n=2)
    np.testing.assert_array_equal(best.probs, maps.probs[3].astype(np.float32))
    assert best.score > second.score
    for question in ({}, {"probs": maps.probs[0], "embedding": maps.embeddings[0]}):
        with pytest.raises(ValueError, match="give either"):
            store.match(**question)


def test_a_slow_store_takes_what_it_has_time_for(stores: Stores) -> None:
    def tick() -> float:
        stores.time_s += TAKE_FOR_S
        return stores.time_s

    store = ExpertMapStore(HEADER, None, put=lambda maps: maps, clock=tick)
    maps = new_maps(1, 40)
    taken = store.sync("reader", maps, Version()).num_taken
    assert 0 < taken < 40
    assert store.names == set(maps.names[:taken].tolist())
    assert store.sync("reader", maps[taken:], Version()).num_taken > 0
