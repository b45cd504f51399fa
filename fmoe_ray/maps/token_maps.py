"""The mean expert map of each input token: what a prompt will need, told from its tokens alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fmoe_ray.maps.named import NamedMaps


class TokenMaps:
    """Of the newest `capacity` tokens seen. Maps of whole prompts, without one token, are left out.

    L layers, J experts.
    """

    def __init__(self, *, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._means: dict[int, tuple[NDArray[np.float32], int]] = {}

    def __len__(self) -> int:
        return len(self._means)

    def add(self, maps: NamedMaps) -> None:
        for token, probs_LJ in zip(maps.token_ids.tolist(), maps.probs, strict=True):
            if token < 0:
                continue
            mean, count = self._means.pop(token, (np.zeros(probs_LJ.shape, np.float32), 0))
            self._means[token] = mean + (probs_LJ - mean) / (count + 1), count + 1
        for token in list(self._means)[: max(0, len(self._means) - self._capacity)]:
            del self._means[token]

    def predict(self, tokens: Sequence[int]) -> NDArray[np.float32] | None:
        """[L, J], the mean over the tokens that are known; None where none is."""
        known = [self._means[token][0] for token in tokens if token in self._means]
        return np.mean(known, axis=0) if known else None
