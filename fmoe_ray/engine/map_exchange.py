"""Exchanges what a replica learns with the store that all replicas of its model share.

Runs on a thread of its own, and no step ever waits for it. Knows no Ray: see `SharedStore`.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fmoe_ray.errors import FmoeError, StepTimeoutError, StoreUnavailableError
from fmoe_ray.maps.named import NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore

logger = logging.getLogger(__name__)

MAX_SENT = 256
"""Maps sent in one round; the others follow while they are still stored."""
_MERGED_AT_ONCE = 32  # compared with the store in one pass; between them the matcher goes on
_BORROW_TIMEOUT_S = 30.0  # a long prompt's iteration ends within this
_CLOSE_TIMEOUT_S = 10.0
_MAX_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """Where the shared store stands. Numbers of two lives of the store cannot be compared."""

    life: int = 0
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    version: Version
    num_taken: int
    """Of the outgoing: the first ones, as many as the store had time for."""
    maps: Sequence[NamedMaps]
    """What came since the version that was asked for; everything if that was another life's."""


class SharedStore(Protocol):
    """All methods may block, for a bounded time, and raise StoreUnavailableError."""

    def join(self) -> None:
        """Raises FingerprintError or StoreError where the store is not of this model."""
        ...

    def sync(self, outgoing: NamedMaps, since: Version) -> Update:
        """Gives the store `outgoing`, which may be empty, and fetches what is new."""
        ...

    def flush(self) -> None:
        """The store writes what it has into its file, if it has one."""
        ...


class Lender(Protocol):
    """Who keeps the maps: `engine.learned_maps.LearnedMaps`."""

    def borrow(self, timeout_s: float) -> AbstractContextManager[MapStore]: ...


class MapExchange:
    """One round a second: sends what was learnt, merges what others learnt.

    The backlog is the replica's own store: what could not be sent yet is sent later if it is still
    there, so nothing grows while the shared store is away.
    """

    def __init__(
        self,
        lender: Lender,
        shared: SharedStore,
        *,
        publishes: bool = True,
        interval_s: float = 1.0,
    ) -> None:
        """With `publishes` off it only receives: all ranks learn the same, one of them tells."""
        self._lender = lender
        self._shared = shared
        self._publishes = publishes
        self._interval_s = interval_s
        self._named: NamedStore | None = None
        self._version = Version()
        self._known: set[int] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="map-exchange", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends what is left and has it written, unless the store is away. Before the lender is
        closed.
        """
        self._is_closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the map store has not answered for %g s", _CLOSE_TIMEOUT_S)

    def run_once(self) -> None:
        """One round. Raises StoreUnavailableError, or StepTimeoutError if no iteration ends; the
        next round does what this one could not.
        """
        outgoing = self._collect()
        update = self._shared.sync(outgoing, self._version)
        if update.version.life != self._version.life:
            self._known.clear()  # it may have lost what it was told
        self._known.update(outgoing.names[: update.num_taken].tolist())
        for maps in update.maps:
            self._merge(maps)
        self._version = update.version

    def _collect(self) -> NamedMaps:
        with self._lender.borrow(_BORROW_TIMEOUT_S) as store:
            named = self._refreshed(store)
            self._known &= named.names
            return named.read(named.unknown_to(self._known)[: MAX_SENT * self._publishes])

    def _merge(self, maps: NamedMaps) -> None:
        for begin in range(0, len(maps), _MERGED_AT_ONCE):
            part = maps[begin : begin + _MERGED_AT_ONCE]
            with self._lender.borrow(_BORROW_TIMEOUT_S) as store:
                self._refreshed(store).insert(part)
            self._known.update(part.names.tolist())

    def _refreshed(self, store: MapStore) -> NamedStore:
        if self._named is None:
            self._named = NamedStore(store)
        else:
            self._named.refresh()
        return self._named

    def _run(self) -> None:
        pause_s = self._interval_s
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(pause_s)
            try:
                self.run_once()
                if is_last and self._publishes:
                    self._shared.flush()  # the cluster may end with this replica
                pause_s = self._interval_s
            except (StoreUnavailableError, StepTimeoutError) as error:
                if pause_s == self._interval_s:
                    logger.warning("expert maps are not exchanged now: %s", error)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            except FmoeError as error:
                logger.error("expert maps are not exchanged any more: %s", error)
                return
