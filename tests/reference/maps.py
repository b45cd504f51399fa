"""Paper 4.2 and 4.4: similarity, redundancy, deduplication. Legend: N maps, L layers, J experts."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def as_stored(values: NDArray[np.float32]) -> Array:
    """Half precision, as the store keeps it."""
    return np.asarray(np.minimum(values, 65504).astype(np.float16), np.float64)


def cosines(query: NDArray[np.floating], stored: NDArray[np.floating]) -> Array:
    """[N] of query [...] with stored [N, ...]; 0 where one of the two is a zero vector."""
    query = np.asarray(query, np.float64).ravel()
    stored = np.asarray(stored, np.float64).reshape(len(stored), -1)
    norms = np.linalg.norm(stored, axis=1) * np.linalg.norm(query)
    dots = stored @ query
    result: Array = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
    return result


def rdy(semantic: Array, whole_map: Array, *, distance: int, num_layers: int) -> Array:
    share = min(distance, num_layers) / num_layers
    return share * semantic + (1 - share) * whole_map


class OneByOne:
    """A store of C maps [L, J] and embeddings [h], filled one by one; a full one replaces the map
    of the largest RDY, the first of those less than 1e-9 below it.
    """

    def __init__(self, *, capacity: int, distance: int) -> None:
        self.capacity = capacity
        self.distance = distance
        self.maps: list[Array] = []
        self.embeddings: list[Array] = []

    def insert(
        self, probs_LJ: NDArray[np.float32], embedding: NDArray[np.float32], *, is_unit: bool
    ) -> int:
        """Returns where the map went. An embedding that is of unit length is kept as it is."""
        new_map = as_stored(probs_LJ)
        new_embedding = as_stored(embedding if is_unit else unit(embedding))
        if len(self.maps) < self.capacity:
            self.maps.append(new_map)
            self.embeddings.append(new_embedding)
            return len(self.maps) - 1
        scores = rdy(
            cosines(embedding, np.stack(self.embeddings)),
            cosines(probs_LJ, np.stack(self.maps)),
            distance=self.distance,
            num_layers=len(probs_LJ),
        )
        slot = int(np.argmax(scores >= scores.max() - 1e-9))
        self.maps[slot], self.embeddings[slot] = new_map, new_embedding
        return slot


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scaled to length 1; zeros for a zero vector."""
    length = np.linalg.norm(vector.astype(np.float64))
    return np.asarray(vector * (1 / length if length > 0 else 0.0), np.float32)


def counts(chosen_TLJ: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The coarse tracker: a request's activation counts are its maps' choices, summed."""
    return np.asarray(chosen_TLJ.sum(axis=0), np.int64)
