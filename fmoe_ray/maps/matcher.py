"""Finds the stored iterations that resemble the one in progress (paper 4.2)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fmoe_ray import _native
from fmoe_ray._native import Match
from fmoe_ray.maps.store import MapStore

__all__ = ["Match", "Matcher"]


class Matcher:
    """Semantic search before the first layer, trajectory search after every gate.

    R rows, N stored maps, J experts, h embedding size. The store must not change between `start`
    and the last question about that iteration (EngineError). Releases the GIL; not thread-safe.

        matcher.start(num_rows=1, embeddings=embedding)
        matcher.observe(0, probs)
        match = matcher.best_trajectory(0)
    """

    def __init__(self, store: MapStore, *, num_columns: int = 0) -> None:
        """`num_columns` 0 compares all J experts of a layer; n only the row's n most probable.

        A score is then a lower bound of the cosine.
        """
        self.store = store
        self._native = _native.Matcher(store.native, num_columns)

    def start(self, *, num_rows: int, embeddings: NDArray[np.float32] | None = None) -> None:
        """Forgets the iteration before. embeddings [R, h], or None where there are none."""
        self._native.start(num_rows, embeddings)

    def observe(self, layer: int, probs: NDArray[np.float32]) -> None:
        """Adds gate `layer` to every row's trajectory. probs [R, J]; layers come in order."""
        self._native.observe(layer, probs)

    def best_semantic(self, row: int) -> Match:
        return self._native.best_semantic(row)

    def best_trajectory(self, row: int) -> Match:
        return self._native.best_trajectory(row)

    def nearest_semantic(self, row: int, n: int) -> list[Match]:
        """The n most similar entries, best first, the lower index first among equals."""
        return self._native.nearest_semantic(row, n)

    def nearest_trajectory(self, row: int, n: int) -> list[Match]:
        return self._native.nearest_trajectory(row, n)

    def semantic_scores(self) -> NDArray[np.float32]:
        """[R, N] cosine of embeddings; 0 without one."""
        return np.asarray(self._native.semantic_scores())

    def trajectory_scores(self) -> NDArray[np.float32]:
        """[R, N] cosine of the layers observed so far; 0 for a zero vector."""
        return np.asarray(self._native.trajectory_scores())

    def vote(
        self,
        neighbours: Sequence[Match],
        *,
        first_layer: int,
        num_layers: int = 1,
        sharpness: float = 15.0,
        on: Literal["probs", "chosen"] = "probs",
    ) -> NDArray[np.float32]:
        """[num_layers, J] of the neighbours' layers, weighted by softmax(sharpness * score)."""
        return np.asarray(
            self._native.vote(list(neighbours), sharpness, on == "chosen", first_layer, num_layers)
        )
