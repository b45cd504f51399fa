"""How long a full map store takes to place a new map by RDY, beside what the machine allows.

Timings are processor time of one thread; compare those of one run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from fmoe_ray.maps import MapStore

__all__ = ["CASES", "Machine", "StoreCase", "StoreTiming", "bench_store", "measure_machine"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCase:
    """L layers, J experts, h embedding size, C maps stored, B maps that come together."""

    model: str
    num_layers: int
    num_experts: int
    embedding_size: int
    capacity: int = 16_000
    batch: int = 32

    @property
    def num_terms(self) -> int:
        """Numbers of a map and its embedding."""
        return self.num_layers * self.num_experts + self.embedding_size


CASES = (
    StoreCase(model="Mixtral-8x7B", num_layers=32, num_experts=8, embedding_size=4096),
    StoreCase(model="Qwen3-30B-A3B", num_layers=48, num_experts=128, embedding_size=2048),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What one core reaches, the best of several tries."""

    gflops: float
    """Of a large single-precision matrix product."""
    read_gbps: float
    """Of a sum over 256 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreTiming:
    """Per map, medians over rounds in which all that is compared takes its turn."""

    case: StoreCase
    together_ms: float
    """B maps stored by one call."""
    alone_ms: float
    """Maps stored by one call each."""
    product_ms: float
    """The bare product [B, L*J + h] x [L*J + h, C] in torch, of maps kept in single precision."""
    compute_limit_ms: float
    """The product's floating-point operations at the machine's rate."""
    memory_limit_ms: float
    """The store's bytes, in half precision, read once for B maps."""

    @property
    def speedup(self) -> float:
        """Of maps that come together."""
        return self.alone_ms / self.together_ms

    @property
    def over_limit(self) -> float:
        """Against the larger of the two limits: as if the other were hidden altogether."""
        return self.together_ms / max(self.compute_limit_ms, self.memory_limit_ms)


def measure_machine() -> Machine:
    with _one_thread():
        square = torch.rand(1024, 1024)
        array = torch.rand(1 << 26)
        compute_s = min(_seconds(lambda: square @ square) for _ in range(10))
        read_s = min(_seconds(array.sum) for _ in range(5))
    return Machine(gflops=2 * 1024**3 / compute_s / 1e9, read_gbps=array.nbytes / read_s / 1e9)


def bench_store(
    case: StoreCase, machine: Machine, *, rounds: int = 7, seed: int = 0
) -> StoreTiming:
    """On random distributions and embeddings."""
    rng = np.random.default_rng(seed)
    store = MapStore(
        num_layers=case.num_layers,
        num_experts=case.num_experts,
        top_k=2,
        capacity=case.capacity,
        embedding_size=case.embedding_size,
    )
    for start in range(0, case.capacity, 1_000):
        _insert(store, *_random_maps(rng, case, min(1_000, case.capacity - start)))
    together, alone, product = [], [], []
    with _one_thread():
        stored = torch.rand(case.num_terms, case.capacity)
        queries = torch.rand(case.batch, case.num_terms)
        for _ in range(rounds):
            maps = _random_maps(rng, case, case.batch)
            together.append(_seconds(partial(_insert, store, *maps)) / case.batch)
            alone.append(_seconds(partial(_insert, store, *_random_maps(rng, case, 1))))
            product.append(_seconds(partial(torch.matmul, queries, stored)) / case.batch)
    flops = 2 * case.num_terms * case.capacity
    stored_bytes = 2 * case.num_terms * case.capacity
    return StoreTiming(
        case=case,
        together_ms=float(np.median(together)) * 1e3,
        alone_ms=float(np.median(alone)) * 1e3,
        product_ms=float(np.median(product)) * 1e3,
        compute_limit_ms=flops / machine.gflops / 1e6,
        memory_limit_ms=stored_bytes / case.batch / machine.read_gbps / 1e6,
    )


def _insert(store: MapStore, probs: Floats, embeddings: Floats) -> None:
    store.insert(probs, embeddings=embeddings)


def _random_maps(rng: np.random.Generator, case: StoreCase, count: int) -> tuple[Floats, Floats]:
    gates = np.exp(rng.normal(scale=2.0, size=(count, case.num_layers, case.num_experts)))
    probs = np.asarray(gates / gates.sum(-1, keepdims=True), np.float32)
    return probs, rng.normal(size=(count, case.embedding_size)).astype(np.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(action: Callable[[], object]) -> float:
    """Of this thread, which does all the work: a busy machine adds nothing."""
    begin = time.thread_time()
    action()
    return time.thread_time() - begin
