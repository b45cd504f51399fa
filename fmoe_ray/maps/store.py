"""The expert maps of past iterations (paper 4.1, 4.4).

Knows no request and no clock; `store_file` knows how it lies on a disk.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fmoe_ray import _native
from fmoe_ray._native import EntryRef, Geometry
from fmoe_ray.errors import StoreError
from fmoe_ray.maps.store_file import StoreContent, StoreHeader, read_store, write_store

__all__ = ["EntryRef", "MapEntry", "MapStore"]

_BATCH = 1024  # maps copied at once, so that a copy in single precision stays small


@dataclass(frozen=True, kw_only=True, slots=True)
class MapEntry:
    """One stored iteration."""

    probs: NDArray[np.float32]
    """[L, J]"""
    embedding: NDArray[np.float32]
    """[h], scaled to length 1; zeros where there was none."""
    chosen: NDArray[np.bool_]
    """[L, J]"""
    token_id: int
    predecessor: int | None
    """The entry of the same request's iteration before this one, while it is stored."""
    successor: int | None


class MapStore:
    """Up to C maps; a full store replaces the most redundant one.

    L layers, J experts, N stored maps, h embedding size. Maps are kept in half precision. Not
    thread-safe; change it between iterations only.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        capacity: int,
        embedding_size: int = 0,
        prefetch_distance: int = 3,
        fingerprint: str = "",
    ) -> None:
        """`fingerprint` names the model that the maps are of. Raises ValueError for a bad shape.

        Without embeddings (`embedding_size` 0) every semantic score is 0.
        """
        self.native = _native.MapStore(
            Geometry(num_layers, num_experts, top_k), capacity, embedding_size, prefetch_distance
        )
        self.fingerprint = fingerprint

    @classmethod
    def of(cls, native: _native.MapStore, *, fingerprint: str) -> "MapStore":
        """A view of a predictor's store: both names change the same maps."""
        store = cls.__new__(cls)
        store.native = native
        store.fingerprint = fingerprint
        return store

    def __len__(self) -> int:
        return self.native.size

    @property
    def capacity(self) -> int:
        return self.native.capacity

    @property
    def map_bytes(self) -> int:
        """Of the maps alone, at full capacity."""
        return self.native.map_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.native.embedding_bytes

    def insert(
        self,
        probs: NDArray[np.float32],
        *,
        embeddings: NDArray[np.float32] | None = None,
        chosen: NDArray[np.bool_] | None = None,
        token_ids: NDArray[np.int32] | None = None,
        predecessors: Sequence[EntryRef] = (),
    ) -> list[EntryRef]:
        """Stores maps [n, L, J] in order; embeddings [n, h], chosen [n, L, J], token_ids [n].

        A full store replaces the entry of the largest RDY (paper 4.4), the lowest of those less
        than 1e-9 apart, which may be an earlier one of this batch. Maps that come together go where
        they would go one by one, but a large store is read once for up to 64 of them. Raises
        ValueError, with nothing stored, for probabilities that are negative or not finite and for
        shapes that do not fit.
        """
        return self.native.insert(
            np.ascontiguousarray(probs, np.float32),
            embeddings,
            None if chosen is None else np.ascontiguousarray(chosen, np.uint8),
            token_ids,
            list(predecessors),
            False,
        )

    def entry(self, index: int) -> MapEntry:
        """Raises ValueError beyond the entries stored."""
        content = self.read(index, 1)
        previous = int(self.native.predecessors()[index])
        following = int(self.native.successors()[index])
        return MapEntry(
            probs=content.probs[0].astype(np.float32),
            embedding=content.embeddings[0].astype(np.float32),
            chosen=content.chosen[0],
            token_id=int(self.native.token_ids()[index]),
            predecessor=None if previous < 0 else previous,
            successor=None if following < 0 else following,
        )

    def ref(self, index: int) -> EntryRef:
        return self.native.ref(index)

    def is_current(self, ref: EntryRef) -> bool:
        """False once the entry was replaced."""
        return self.native.is_current(ref)

    def semantic_scores(self, embedding: NDArray[np.float32]) -> NDArray[np.float32]:
        """[N] cosines of an embedding [h]."""
        return np.asarray(self.native.semantic_scores(embedding))

    def map_scores(self, probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """[N] cosines of a whole map [L, J]."""
        return np.asarray(self.native.map_scores(probs))

    def redundancy(self, semantic_score: float, map_score: float) -> float:
        """RDY (paper 4.4)."""
        return self.native.redundancy(semantic_score, map_score)

    def merge(self, other: "MapStore") -> None:
        """Stores the other's maps here, by the same rule as new iterations; keeps their links.

        Raises FingerprintError or StoreError where the two are not of one model and shape.
        """
        other.header.require_like(self.header)
        self._absorb(other.read(0, len(other)))

    def copy(self, *, capacity: int) -> "MapStore":
        """These maps in a store of another capacity; if it is smaller, the most redundant go."""
        store = self.empty(self.header, capacity=capacity)
        store._absorb(self.read(0, len(self)))
        return store

    @property
    def header(self) -> StoreHeader:
        geometry = self.native.geometry
        return StoreHeader(
            fingerprint=self.fingerprint,
            num_layers=geometry.num_layers,
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
            embedding_size=self.native.embedding_size,
            prefetch_distance=self.native.prefetch_distance,
            capacity=self.capacity,
            size=len(self),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Replaces the file at once or not at all. Raises StoreError if it cannot be written."""
        write_store(path, self.header, self.read(0, len(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, like: "MapStore | None" = None) -> "MapStore":
        """The store as it was saved; its scores are the same to the bit.

        Raises StoreError for a file that is damaged or no store, and FingerprintError or
        StoreError for one that could not be merged into `like`.
        """
        header, content = read_store(path)
        if like is not None:
            header.require_like(like.header, source=str(path))
        try:
            store = cls.empty(header, capacity=header.capacity)
            store._absorb(content)
        except (ValueError, MemoryError) as error:
            raise StoreError(f"{path}: {error}") from error
        return store

    @classmethod
    def empty(cls, header: StoreHeader, *, capacity: int) -> "MapStore":
        return cls(
            num_layers=header.num_layers,
            num_experts=header.num_experts,
            top_k=header.top_k,
            capacity=capacity,
            embedding_size=header.embedding_size,
            prefetch_distance=header.prefetch_distance,
            fingerprint=header.fingerprint,
        )

    def read(self, first: int, count: int) -> StoreContent:
        """Copies entries. Raises ValueError beyond those stored."""
        return StoreContent(
            probs=np.asarray(self.native.read_probs(first, count)).view(np.float16),
            embeddings=np.asarray(self.native.read_embeddings(first, count)).astype(np.float16),
            chosen=np.asarray(self.native.read_chosen(first, count)).astype(np.bool_),
            token_ids=np.asarray(self.native.token_ids()[first : first + count]),
            predecessors=np.asarray(self.native.predecessors()[first : first + count]),
        )

    def _absorb(self, content: StoreContent) -> None:
        refs: list[EntryRef] = []
        for start in range(0, len(content.probs), _BATCH):
            part = slice(start, start + _BATCH)
            refs += self.native.insert(
                content.probs[part].astype(np.float32),
                content.embeddings[part].astype(np.float32),
                content.chosen[part].astype(np.uint8),
                np.ascontiguousarray(content.token_ids[part]),
                [],
                True,
            )
        # A predecessor may lie behind its successor, so links wait until all maps are in.
        for index, previous in enumerate(content.predecessors):
            if previous >= 0:
                self.native.link(refs[previous], refs[index])
