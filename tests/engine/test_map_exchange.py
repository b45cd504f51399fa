"""Replicas exchange maps through a shared store, here in one process and without Ray."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fmoe_ray.actors.map_store import ExpertMapStore
from fmoe_ray.engine.map_exchange import MAX_SENT, MapExchange, Update, Version
from fmoe_ray.errors import StoreUnavailableError
from fmoe_ray.maps.named import NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore

L, J = 2, 4


@dataclass
class Replica:
    """Lends its maps as an offloader does, and learns at random."""

    seed: int
    capacity: int = 1000
    maps: MapStore = field(init=False)

    def __post_init__(self) -> None:
        self.maps = MapStore(num_layers=L, num_experts=J, top_k=2, capacity=self.capacity)
        self._random = np.random.default_rng(self.seed)

    @contextmanager
    def borrow(self, timeout_s: float) -> Iterator[MapStore]:
        yield self.maps

    def learn(self, num_maps: int) -> None:
        self.maps.insert(self._random.dirichlet(np.ones(J), (num_maps, L)).astype(np.float32))

    def names(self) -> set[int]:
        return NamedStore(self.maps).names


class LocalStore:
    """A shared store that can be away, or begin a new life without its maps."""

    def __init__(self, like: Replica, path: Path | None = None) -> None:
        self._header = like.maps.header
        self._path = None if path is None else str(path)
        self.is_away = False
        self.num_calls = 0
        self.restart()

    def restart(self) -> None:
        self.time_s = 0.0
        self.store = ExpertMapStore(
            self._header, self._path, put=lambda maps: maps, clock=lambda: self.time_s
        )

    def join(self) -> None:
        self.store.join(self._header)

    def flush(self) -> None:
        self.store.flush()

    def sync(self, outgoing: NamedMaps, since: Version) -> Update:
        self.num_calls += 1
        if self.is_away:
            raise StoreUnavailableError("the store is away")
        self.time_s += 1
        segments = self.store.sync("test", outgoing, since)
        self.store.check_integrity()
        return Update(version=segments.version, num_taken=segments.num_taken, maps=segments.refs)


@pytest.fixture
def two() -> tuple[Replica, Replica, LocalStore]:
    first, second = Replica(1), Replica(2)
    return first, second, LocalStore(first)


def test_replicas_end_with_the_same_maps(two: tuple[Replica, Replica, LocalStore]) -> None:
    *replicas, shared = two
    exchanges = [MapExchange(replica, shared) for replica in replicas]
    for _ in range(3):
        for replica, exchange in zip(replicas, exchanges, strict=True):
            replica.learn(5)
            exchange.run_once()
    for exchange in exchanges * 2:
        exchange.run_once()
    assert len(replicas[0].names()) == 30
    assert replicas[0].names() == replicas[1].names() == shared.store.names
    assert len(replicas[0].maps) == len(replicas[1].maps) == 30  # nothing twice


def test_a_latecomer_gets_everything_also_after_many_publications(
    two: tuple[Replica, Replica, LocalStore],
) -> None:
    first, second, shared = two
    exchange = MapExchange(first, shared)
    for _ in range(40):
        first.learn(1)
        exchange.run_once()
    MapExchange(second, shared).run_once()
    assert second.names() == first.names()
    assert len(second.maps) == 40


def test_a_store_that_lost_its_maps_is_told_them_again(
    two: tuple[Replica, Replica, LocalStore],
) -> None:
    first, second, shared = two
    exchanges = [MapExchange(first, shared), MapExchange(second, shared)]
    first.learn(4)
    second.learn(3)
    for exchange in exchanges * 2:
        exchange.run_once()
    shared.restart()
    for exchange in exchanges * 3:
        exchange.run_once()
    assert shared.store.names == first.names() == second.names()
    assert len(first.maps) == 7


def test_while_the_store_is_away_maps_wait_in_the_replica(
    two: tuple[Replica, Replica, LocalStore],
) -> None:
    first, _, shared = two
    exchange = MapExchange(first, shared)
    shared.is_away = True
    for _ in range(3):
        first.learn(2)
        with pytest.raises(StoreUnavailableError):
            exchange.run_once()
    shared.is_away = False
    exchange.run_once()
    exchange.run_once()
    assert shared.store.names == first.names()
    assert len(first.names()) == 6


def test_a_backlog_is_sent_in_rounds(two: tuple[Replica, Replica, LocalStore]) -> None:
    first, _, shared = two
    first.learn(MAX_SENT + 1)
    exchange = MapExchange(first, shared)
    exchange.run_once()
    assert len(shared.store.names) == MAX_SENT
    exchange.run_once()
    assert len(shared.store.names) == MAX_SENT + 1


def test_ranks_that_do_not_publish_only_receive(two: tuple[Replica, Replica, LocalStore]) -> None:
    first, second, shared = two
    first.learn(3)
    second.learn(3)
    MapExchange(second, shared, publishes=False).run_once()
    assert len(shared.store.names) == 0
    MapExchange(first, shared).run_once()
    receiver = MapExchange(second, shared, publishes=False)
    receiver.run_once()
    assert len(second.names()) == 6
    assert len(shared.store.names) == 3


def test_a_full_store_keeps_its_capacity_and_the_exchange_goes_on() -> None:
    first, second = Replica(1, capacity=8), Replica(2, capacity=8)
    shared = LocalStore(first)
    exchanges = [MapExchange(first, shared), MapExchange(second, shared)]
    for _ in range(10):
        first.learn(5)
        second.learn(5)
        for exchange in exchanges:
            exchange.run_once()
    assert len(shared.store.names) == 8
    calls_of_a_round = 2
    shared.num_calls = 0
    for exchange in exchanges:
        exchange.run_once()
    assert shared.num_calls == calls_of_a_round


def test_the_thread_catches_up_and_sends_what_is_left_when_closed(
    two: tuple[Replica, Replica, LocalStore],
) -> None:
    first, _, shared = two
    shared.is_away = True
    exchange = MapExchange(first, shared, interval_s=0.01)
    first.learn(2)
    exchange.start()
    within(5, lambda: shared.num_calls >= 2)
    shared.is_away = False
    within(5, lambda: len(shared.store.names) == 2)
    first.learn(1)
    exchange.close()
    assert len(shared.store.names) == 3


def test_what_was_learnt_last_is_in_the_file_when_the_exchange_is_closed(tmp_path: Path) -> None:
    replica = Replica(1)
    shared = LocalStore(replica, tmp_path / "maps")
    exchange = MapExchange(replica, shared, interval_s=0.01)
    exchange.start()
    replica.learn(2)
    exchange.close()
    assert len(MapStore.load(tmp_path / "maps", like=replica.maps)) == 2


def within(seconds: float, condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError(f"not within {seconds} s")
