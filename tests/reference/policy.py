"""Paper 4.3 and 4.5, and the searches of 4.2, written down literally.

The policy goes through the planner like a native one; its instructions must be the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fmoe_ray.policy import (
    Cause,
    ExpertCache,
    GateRequested,
    Geometry,
    Instruction,
    IterationStarted,
    Policy,
    Prediction,
    VictimNeeded,
)

from .maps import Array, as_stored, cosines


def delta(score: float) -> float:
    return min(max(1.0 - score, 0.0), 1.0)


def e_prefetch(p: NDArray[np.floating], score: float, top_k: int) -> list[int]:
    """By falling p until their sum >= delta and K are taken; p 0 is never taken."""
    taken: list[int] = []
    for j in sorted(range(len(p)), key=lambda j: (-p[j], j)):
        reached = sum((float(p[i]) for i in taken), start=0.0)
        enough = len(taken) >= top_k and reached >= delta(score)
        if enough or p[j] == 0:
            break
        taken.append(j)
    return taken


def eviction_priority(p: float, frequency: int) -> float:
    return 1 / (max(p, 1e-6) * max(frequency, 1))


class LiteralFmoe(Policy):
    """Everything recomputed from the last prediction of each layer at every question."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.layer = -1
        self.p = np.full((geometry.num_layers, geometry.num_experts), 1 / geometry.num_experts)
        self.ordered: set[int] = set()
        self.started: set[int] = set()

    def layer_of(self, expert: int) -> int:
        return expert // self.geometry.num_experts

    def p_of(self, expert: int) -> float:
        return float(self.p.ravel()[expert])

    def iteration_started(self, event: IterationStarted, cache: ExpertCache) -> list[Instruction]:
        self.layer = -1
        self.ordered, self.started = set(), set()
        return []

    def gate_requested(self, event: GateRequested, cache: ExpertCache) -> list[Instruction]:
        self.layer = event.layer
        self.ordered = {e for e in self.ordered if self.layer_of(e) > self.layer}
        return []

    def predicted(self, prediction: Prediction, cache: ExpertCache) -> list[Instruction]:
        for offset in range(prediction.num_layers):
            layer = prediction.first_layer + offset
            p_RJ = prediction.p[:, offset]
            if not p_RJ.any():
                continue
            self.p[layer] = p_RJ.max(axis=0)
            self.ordered = {e for e in self.ordered if self.layer_of(e) != layer}
            if layer <= self.layer:
                continue
            for p, score in zip(p_RJ, prediction.score[:, offset], strict=True):
                for j in e_prefetch(p, float(score), self.geometry.top_k):
                    expert = layer * self.geometry.num_experts + j
                    self.ordered.add(expert)
                    # What is there, or on its way, needs no copy; it is not fetched again later.
                    if cache.is_absent(expert):
                        self.started.discard(expert)
                    else:
                        self.started.add(expert)
        return []

    def link_free(self, cache: ExpertCache) -> list[Instruction]:
        self.started |= {e for e in self.ordered if not cache.is_absent(e)}
        wanted = [e for e in self.ordered - self.started if cache.is_absent(e)]
        if not wanted:
            return []
        best = max(wanted, key=lambda e: (self.p_of(e) / (self.layer_of(e) - self.layer), -e))
        victim = -1 if cache.num_free else self.least_valuable(cache, spared=self.ordered)
        if victim < 0 and not cache.num_free:
            return []
        self.started.add(best)
        return [Instruction.start_copy(best, victim)]

    def victim(self, needed: VictimNeeded, cache: ExpertCache) -> int:
        spared = self.ordered if needed.cause == Cause.prefetch else set()
        return self.least_valuable(cache, spared=spared)

    def least_valuable(self, cache: ExpertCache, *, spared: set[int]) -> int:
        candidates = [e for e in cache.residents if cache.can_evict(e) and e not in spared]
        if not candidates:
            return -1
        return max(
            candidates,
            key=lambda e: (eviction_priority(self.p_of(e), cache.frequency(e)), -e),
        )


class LiteralSearch:
    """The two searches over a growing list of (map, embedding); no capacity."""

    def __init__(self, *, distance: int) -> None:
        self.distance = distance
        self.maps: list[Array] = []
        self.embeddings: list[NDArray[np.float32]] = []

    def add(self, probs: NDArray[np.float32], embedding: NDArray[np.float32]) -> None:
        self.maps.append(as_stored(probs))
        self.embeddings.append(embedding)

    def semantic(self, embedding: NDArray[np.float32]) -> tuple[int, float]:
        return self._best(cosines(embedding, np.array(self.embeddings)))

    def trajectory(self, prefix: NDArray[np.float32]) -> tuple[int, float]:
        stored = np.array([stored[: len(prefix)] for stored in self.maps])
        return self._best(cosines(prefix, stored))

    @staticmethod
    def _best(scores: Sequence[float] | Array) -> tuple[int, float]:
        best = int(np.argmax(scores))
        return best, float(scores[best])
