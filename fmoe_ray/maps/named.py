"""Maps on their way from one store to another, and what tells them apart.

A map's name is a hash of its content, so the same iteration has the same name everywhere, also
after a restart: sending a map twice does no harm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fmoe_ray.maps.store import MapStore

NO_NAME = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMaps:
    """N maps. L layers, J experts, h embedding size."""

    names: NDArray[np.uint64]
    """[N]"""
    predecessors: NDArray[np.uint64]
    """[N] name of the same request's iteration before, NO_NAME where it is unknown."""
    probs: NDArray[np.float16]
    """[N, L, J]"""
    embeddings: NDArray[np.float16]
    """[N, h], of length 1 or 0"""
    chosen: NDArray[np.bool_]
    """[N, L, J]"""
    token_ids: NDArray[np.int32]
    """[N], -1 where there is none or many"""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> Self:
        return type(self)(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    @classmethod
    def none(cls) -> Self:
        """No maps, of no shape: stores take them all the same."""
        return cls(
            names=np.zeros(0, np.uint64),
            predecessors=np.zeros(0, np.uint64),
            probs=np.zeros((0, 0, 0), np.float16),
            embeddings=np.zeros((0, 0), np.float16),
            chosen=np.zeros((0, 0, 0), np.bool_),
            token_ids=np.zeros(0, np.int32),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Of one part or more."""
        return cls(
            **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        )


class NamedStore:
    """The names of a store's maps. The store may be changed by others too; then `refresh` first.

    Not thread-safe: used by whoever may use the store.
    """

    def __init__(self, store: MapStore) -> None:
        self.store = store
        self._names = np.zeros(store.capacity, np.uint64)
        self._generations = np.zeros(store.capacity, np.uint32)
        self._entries: dict[int, int] = {}
        self.refresh()

    def __contains__(self, name: int) -> bool:
        return name in self._entries

    @property
    def names(self) -> set[int]:
        return set(self._entries)

    def unknown_to(self, names: set[int]) -> list[int]:
        """The names that are not among these, in the order of entries: first those stored first,
        so that runs of iterations stay together.
        """
        own = self._names[: len(self.store)].tolist()
        return [name for name in own if name not in names and name in self._entries]

    def refresh(self) -> None:
        """Names what was stored since."""
        now = np.asarray(self.store.native.generations())
        changed = np.flatnonzero(now != self._generations[: len(now)])
        self._generations[: len(now)] = now
        for first, count in _runs(changed):
            content = self.store.read(first, count)
            for index in range(count):
                name = _name(content.probs[index], int(content.token_ids[index]))
                self._set(first + index, name)

    def read(self, names: Sequence[int]) -> NamedMaps:
        """Those of the names that are stored, in the order of entries."""
        entries = np.array(sorted(self._entries[n] for n in names if n in self._entries), np.int64)
        parts = [self.store.read(first, count) for first, count in _runs(entries)]
        parts = parts or [self.store.read(0, 0)]
        before = np.concatenate([part.predecessors for part in parts])
        return NamedMaps(
            names=self._names[entries],
            predecessors=np.where(before < 0, np.uint64(NO_NAME), self._names[before]),
            probs=np.concatenate([part.probs for part in parts]),
            embeddings=np.concatenate([part.embeddings for part in parts]),
            chosen=np.concatenate([part.chosen for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
        )

    def insert(self, maps: NamedMaps) -> NamedMaps:
        """Stores those that are new, by the same rule as new iterations; returns them."""
        seen: set[int] = set()
        is_new = np.zeros(len(maps), np.bool_)
        for index, name in enumerate(maps.names.tolist()):
            is_new[index] = name not in self._entries and name not in seen
            seen.add(name)
        fresh = maps[is_new]
        if len(fresh) == 0:
            return fresh
        refs = self.store.native.insert(
            fresh.probs.astype(np.float32),
            fresh.embeddings.astype(np.float32),
            fresh.chosen.astype(np.uint8),
            np.ascontiguousarray(fresh.token_ids),
            [],
            True,
        )
        generations = np.asarray(self.store.native.generations())
        self._generations[: len(generations)] = generations
        for ref, name in zip(refs, fresh.names.tolist(), strict=True):
            self._set(ref.index, name)
        for name, before in zip(fresh.names.tolist(), fresh.predecessors.tolist(), strict=True):
            if name in self._entries and before in self._entries:
                store = self.store
                store.native.link(store.ref(self._entries[before]), store.ref(self._entries[name]))
        return fresh

    def _set(self, entry: int, name: int) -> None:
        old = int(self._names[entry])
        if self._entries.get(old) == entry:
            del self._entries[old]
        self._names[entry] = name
        self._entries[name] = entry

    def check_integrity(self) -> None:
        size = len(self.store)
        assert all(entry < size for entry in self._entries.values())
        assert all(int(self._names[entry]) == name for name, entry in self._entries.items())
        content = self.store.read(0, size)
        names = [_name(content.probs[i], int(content.token_ids[i])) for i in range(size)]
        assert names == self._names[:size].tolist()
        assert set(self._entries) <= set(names)


def _name(probs_LJ: NDArray[np.float16], token_id: int) -> int:
    digest = blake2b(np.ascontiguousarray(probs_LJ).data, digest_size=8)
    digest.update(token_id.to_bytes(4, "little", signed=True))
    return max(int.from_bytes(digest.digest(), "little"), NO_NAME + 1)


def _runs(indices: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive numbers in an ascending array."""
    for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        if len(run):
            yield int(run[0]), len(run)
