"""How long the trajectory search takes a layer and request, against NumPy, and what a store weighs.

Timings are of one core; compare the two columns of one run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fmoe_ray.maps import MapStore, Matcher

__all__ = [
    "DEFAULT_CASES",
    "MatcherCase",
    "MatcherTiming",
    "StoreMemory",
    "bench_matcher",
    "store_memory",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatcherCase:
    """One store and how much of a layer is compared. num_columns 0 compares all experts."""

    capacity: int
    num_columns: int
    num_layers: int = 24
    num_experts: int = 64


DEFAULT_CASES = (
    MatcherCase(capacity=1_000, num_columns=0),
    MatcherCase(capacity=32_000, num_columns=8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatcherTiming:
    """Medians over layers and iterations, one request."""

    case: MatcherCase
    native_us: float
    """Add layer l to the running products and find the best match."""
    numpy_us: float
    """Recompute the cosine of the whole prefix 1..l with every stored one, and find the best."""

    @property
    def speedup(self) -> float:
        return self.numpy_us / self.native_us


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMemory:
    """Host memory of a full store."""

    model: str
    num_maps: int
    map_bytes: int
    embedding_bytes: int


# The paper's models (table 1): L, J, K, h.
_MODELS = {
    "Mixtral-8x7B": (32, 8, 2, 4096),
    "Qwen1.5-MoE-A2.7B": (24, 60, 4, 2048),
    "Phi-3.5-MoE": (32, 16, 2, 4096),
}


def bench_matcher(case: MatcherCase, *, iterations: int = 8, seed: int = 0) -> MatcherTiming:
    """On random distributions. The NumPy side is timed on every fourth layer of one iteration."""
    rng = np.random.default_rng(seed)
    store = MapStore(
        num_layers=case.num_layers,
        num_experts=case.num_experts,
        top_k=min(8, case.num_experts),
        capacity=case.capacity,
    )
    for start in range(0, case.capacity, 1_000):
        store.insert(_gates(rng, min(1_000, case.capacity - start), case))
    queries = _gates(rng, iterations, case)
    matcher = Matcher(store, num_columns=case.num_columns)
    native, recomputed = [], []
    for query in queries:
        matcher.start(num_rows=1)
        for layer in range(case.num_layers):
            row = query[layer : layer + 1]
            native.append(_seconds(partial(_search, matcher, layer, row)))
    stored = _flat_maps(store)
    for layer in range(0, case.num_layers, 4):
        prefix = queries[0, : layer + 1].ravel()
        recomputed.append(_seconds(partial(_recompute, stored, prefix)))
    return MatcherTiming(
        case=case,
        native_us=float(np.median(native)) * 1e6,
        numpy_us=float(np.median(recomputed)) * 1e6,
    )


def store_memory(num_maps: int = 32_000) -> list[StoreMemory]:
    """Of the paper's three models."""
    found = []
    for model, (num_layers, num_experts, top_k, embedding_size) in _MODELS.items():
        store = MapStore(
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            capacity=num_maps,
            embedding_size=embedding_size,
        )
        found.append(
            StoreMemory(
                model=model,
                num_maps=num_maps,
                map_bytes=store.map_bytes,
                embedding_bytes=store.embedding_bytes,
            )
        )
    return found


def _gates(rng: np.random.Generator, count: int, case: MatcherCase) -> NDArray[np.float32]:
    logits = rng.normal(scale=2.0, size=(count, case.num_layers, case.num_experts))
    gates = np.exp(logits, dtype=np.float32)
    return np.asarray(gates / gates.sum(-1, keepdims=True), np.float32)


def _flat_maps(store: MapStore) -> NDArray[np.float32]:
    """[N, L * J]"""
    halves = np.asarray(store.native.read_probs(0, len(store))).view(np.float16)
    return halves.reshape(len(store), -1).astype(np.float32)


def _search(matcher: Matcher, layer: int, row: NDArray[np.float32]) -> None:
    matcher.observe(layer, row)
    matcher.best_trajectory(0)


def _recompute(stored: NDArray[np.float32], prefix: NDArray[np.float32]) -> None:
    prefixes = stored[:, : len(prefix)]
    # einsum and not @: BLAS would use more than the one core that the other side has.
    dots = np.einsum("np,p->n", prefixes, prefix)
    squares = np.einsum("np,np->n", prefixes, prefixes)
    norms = np.sqrt(squares) * np.linalg.norm(prefix)
    (dots / np.maximum(norms, 1e-12)).argmax()


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
