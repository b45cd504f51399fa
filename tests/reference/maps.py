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


def counts(chosen_TLJ: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The coarse tracker: a request's activation counts are its maps' choices, summed."""
    return np.asarray(chosen_TLJ.sum(axis=0), np.int64)
