"""ExpertMapStore: what all replicas of one model have learnt, one named detached actor a model.

Matches for clients too. Driven by its callers: no thread and no timer of its own.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmoe_ray.engine.map_exchange import Version
from fmoe_ray.errors import FingerprintError, StoreError
from fmoe_ray.maps.map_file import MapFile
from fmoe_ray.maps.matcher import Matcher
from fmoe_ray.maps.named import NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore
from fmoe_ray.maps.store_file import StoreHeader

logger = logging.getLogger(__name__)

PUBLISH_EVERY_S = 0.5
SAVE_EVERY_S = 10.0
TAKE_FOR_S = 0.5
_TAKEN_AT_ONCE = 32  # compared with the store in one pass
MAX_SEGMENTS = 16
_FORGET_READER_S = 60.0
_LOCK_TIMEOUT_S = 2.0  # a caller waits meanwhile; what is not saved now is saved later


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """References to NamedMaps in the object store; the store's process owns them."""

    version: Version
    num_taken: int
    """Of the maps sent with the call, from the first on."""
    refs: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedMap:
    score: float
    """Cosine; what was asked about and this map."""
    probs: NDArray[np.float32]
    """[L, J]"""
    token_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    header: StoreHeader
    version: Version
    num_received: int
    num_duplicates: int
    """Of the received: stored already."""
    num_segments: int
    readers: dict[str, Version]
    """What each replica's ranks have merged, of those heard of in the last minute."""
    path: str | None
    pid: int


@dataclass(frozen=True, slots=True)
class _Segment:
    number: int
    ref: Any


class ExpertMapStore:
    """Receives maps as arrays, drops what it has, replaces the most redundant when it is full.

    What was accepted since the last publication becomes one immutable segment: one object, put by
    this process, so that it lives as long as the store. Many segments become one snapshot.
    """

    def __init__(
        self,
        header: StoreHeader,
        path: str | None,
        *,
        put: Callable[[NamedMaps], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file if there is one. Raises FingerprintError or StoreError if it is damaged,
        of another model, or in a place that cannot be written.
        """
        self._put = put
        self._clock = clock
        self._file = None if path is None else MapFile(Path(path), lock_timeout_s=_LOCK_TIMEOUT_S)
        self._maps = MapStore.empty(header, capacity=header.capacity)
        if self._file is not None:
            self._file.read_into(self._maps)
        self._named = NamedStore(self._maps)
        self._matcher = Matcher(self._maps)
        self._version = Version(life=secrets.randbits(62) + 1)
        self._pending: list[int] = list(self._named.names)
        self._segments: list[_Segment] = []
        self._readers: dict[str, tuple[Version, float]] = {}
        self._num_received = 0
        self._num_duplicates = 0
        self._published_s = -PUBLISH_EVERY_S
        self._is_saved = False
        self.save()

    @property
    def names(self) -> set[int]:
        """Of the maps stored now."""
        return self._named.names

    def join(self, header: StoreHeader) -> None:
        """Raises FingerprintError or StoreError where the caller's model is not this store's."""
        source = "the running map store (`fmoe store stop MODEL` ends it)"
        self._maps.header.require_like(header, source=source)

    def sync(self, reader: str, outgoing: NamedMaps, since: Version) -> Segments:
        """Takes maps and answers with what the reader lacks. Raises StoreError for maps of another
        shape.
        """
        now = self._clock()
        self._readers[reader] = since, now
        num_taken = self._accept_in_time(outgoing)
        if self._pending and now - self._published_s >= PUBLISH_EVERY_S:
            self._publish(now)
        if now - self._saved_s >= SAVE_EVERY_S:
            self.flush()
        is_of_this_life = since.life == self._version.life
        lacking = [s for s in self._segments if not is_of_this_life or s.number > since.number]
        refs = [segment.ref for segment in lacking]
        return Segments(version=self._version, num_taken=num_taken, refs=refs)

    def match(
        self,
        *,
        embedding: NDArray[np.float32] | None = None,
        probs: NDArray[np.float32] | None = None,
        n: int = 1,
    ) -> list[MatchedMap]:
        """The n most similar maps, best first: semantic search for an embedding [h], trajectory
        search for the gates [l, J] of the first l layers.

        Raises ValueError unless exactly one of the two is given, and for another shape.
        """
        if (embedding is None) == (probs is None):
            raise ValueError("give either embedding [h] or probs [l, J]")
        if embedding is not None:
            self._matcher.start(num_rows=1, embeddings=np.asarray(embedding, np.float32)[None])
            found = self._matcher.nearest_semantic(0, n)
        else:
            self._matcher.start(num_rows=1)
            for layer, row in enumerate(np.asarray(probs, np.float32)):
                self._matcher.observe(layer, row[None])
            found = self._matcher.nearest_trajectory(0, n)
        entries = [(match.score, self._maps.entry(match.entry)) for match in found]
        return [MatchedMap(score=s, probs=e.probs, token_id=e.token_id) for s, e in entries]

    def info(self) -> StoreInfo:
        recent = self._clock() - _FORGET_READER_S
        self._readers = {k: v for k, v in self._readers.items() if v[1] >= recent}
        return StoreInfo(
            header=self._maps.header,
            version=self._version,
            num_received=self._num_received,
            num_duplicates=self._num_duplicates,
            num_segments=len(self._segments),
            readers={reader: version for reader, (version, _) in self._readers.items()},
            path=None if self._file is None else str(self._file.path),
            pid=os.getpid(),
        )

    def save(self) -> None:
        """Replaces the file at once or not at all; what others have saved there is kept and
        published. Raises as `MapFile.save`.
        """
        self._saved_s = self._clock()
        if self._file is not None:
            self._pending += self._file.save(self._named).names.tolist()
        self._is_saved = True

    def _accept_in_time(self, maps: NamedMaps) -> int:
        """In a large full store RDY takes a millisecond a map, and callers wait only so long."""
        deadline = self._clock() + TAKE_FOR_S
        num_taken = 0
        while num_taken < len(maps) and self._clock() <= deadline:
            part = maps[num_taken : num_taken + _TAKEN_AT_ONCE]
            self._accept(part)
            num_taken += len(part)
        return num_taken

    def _accept(self, maps: NamedMaps) -> None:
        try:
            fresh = self._named.insert(maps)
        except ValueError as error:
            raise StoreError(f"maps were refused: {error}") from error
        self._num_received += len(maps)
        self._num_duplicates += len(maps) - len(fresh)
        self._pending += fresh.names.tolist()
        self._is_saved = self._is_saved and len(fresh) == 0

    def _publish(self, now: float) -> None:
        number = self._version.number + 1
        if len(self._segments) >= MAX_SEGMENTS:
            self._segments.clear()
            names = list(self._named.names)
        else:
            names = self._pending  # without those that were replaced meanwhile
        self._segments.append(_Segment(number, self._put(self._named.read(names))))
        self._pending = []
        self._published_s = now
        self._version = Version(life=self._version.life, number=number)

    def flush(self) -> None:
        """Saves what is not saved; if the file cannot be written, only says so in the log."""
        if self._is_saved:
            return
        try:
            self.save()
        except (StoreError, FingerprintError):  # the maps are still here, and the replicas go on
            logger.exception("the expert maps could not be saved")

    def check_integrity(self) -> None:
        self._named.check_integrity()
        self._maps.native.check_integrity()
        numbers = [segment.number for segment in self._segments]
        assert numbers == sorted(set(numbers)), numbers
        assert len(numbers) <= MAX_SEGMENTS
        assert not numbers or numbers[-1] == self._version.number
