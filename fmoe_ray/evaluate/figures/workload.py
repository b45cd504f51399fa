"""A trace cut into what is learned and what is measured; its simulations, each run once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fmoe_ray.config import Budget
from fmoe_ray.evaluate.policy_table import NO_OFFLOAD, blind_policies
from fmoe_ray.evaluate.simulator import Sequences, Simulation, TraceSimulator
from fmoe_ray.policy import list_policies
from fmoe_ray.trace.format import PREFILL, RoutingTrace

SYSTEMS = ("deepspeed", "mixtral-offloading", "promoe", "moe-infinity", "fmoe", "fmoe+")
"""The paper's five and ours, in the order of every picture; `fmoe+` where it exists."""
BASELINES = SYSTEMS[:4]


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMaps:
    """Of N iterations; a prompt's is the mean over its tokens."""

    probs: npt.NDArray[np.float32]
    """[N, L, J]"""
    chosen: npt.NDArray[np.bool_]
    """[N, L, J]"""
    embeddings: npt.NDArray[np.float32] | None
    """[N, h]"""
    is_prefill: npt.NDArray[np.bool_]
    """[N]"""
    request: npt.NDArray[np.int64]
    """[N]"""


class Workload:
    """Keeps every simulation that it ran."""

    def __init__(
        self, *, name: str, trace: RoutingTrace, learned: Sequences, measured: Sequences
    ) -> None:
        self.name = name
        self.trace = trace
        self.learned = learned
        self.measured = measured
        self._simulator = TraceSimulator(trace)
        self._simulations: dict[tuple[object, ...], Simulation] = {}

    def systems(self, names: Sequence[str] = SYSTEMS) -> list[str]:
        """Those that exist here and see something in this trace."""
        known = {info.name for info in list_policies()}
        blind = blind_policies(self.trace, names)
        return [name for name in names if name in known and name not in blind]

    def run(
        self,
        policy: str,
        *,
        load_ratio: float,
        budget: float = 0.25,
        batch: int = 1,
        distance: int = 3,
        capacity: int = 1000,
        eviction: str = "policy",
        has_learned: bool = True,
    ) -> Simulation:
        """`has_learned` False begins with an empty store. Equal runs are simulated once."""
        key = (policy, load_ratio, budget, batch, distance, capacity, eviction, has_learned)
        if key not in self._simulations:
            self._simulations[key] = self._simulator.run(
                policy,
                self.measured,
                slots=self.slots(1.0 if policy == NO_OFFLOAD else budget),
                load_ratio=load_ratio,
                learned=self.learned if has_learned else (),
                batch=batch,
                eviction=eviction,
                prefetch_distance=distance,
                store_capacity=capacity,
            )
        return self._simulations[key]

    def slots(self, budget: float) -> int:
        num_experts = self.trace.num_layers * self.trace.num_experts
        slots = max(int(budget * num_experts), self.trace.top_k)
        return Budget(num_experts=slots).slots(
            num_experts=num_experts, expert_bytes=1, min_slots=self.trace.top_k
        )


def iteration_maps(trace: RoutingTrace, sequences: Sequences, limit: int) -> IterationMaps:
    """The first `limit` iterations of the sequences."""
    steps = [
        (request, *step)
        for request, sequence in enumerate(sequences)
        for step in _steps(trace, *sequence)
    ][:limit]
    shape = (len(steps), trace.num_layers, trace.num_experts)
    probs = np.zeros(shape, np.float32)
    chosen = np.zeros(shape, np.bool_)
    for number, (_, start, length, _) in enumerate(steps):
        tokens = slice(start, start + length)
        ids = trace.expert_ids[tokens].astype(np.int64)
        layers = np.arange(trace.num_layers)[None, :, None]
        chosen[number, np.broadcast_to(layers, ids.shape), ids] = True
        probs[number] = _distribution(trace, tokens, ids).mean(axis=0)
    embeddings = None
    if trace.embeddings is not None:
        embeddings = np.stack(
            [
                trace.embeddings[start : start + length].astype(np.float32).mean(axis=0)
                for _, start, length, _ in steps
            ]
        )
    return IterationMaps(
        probs=probs,
        chosen=chosen,
        embeddings=embeddings,
        is_prefill=np.array([is_prefill for *_, is_prefill in steps], np.bool_),
        request=np.array([request for request, *_ in steps], np.int64),
    )


def _steps(trace: RoutingTrace, start: int, length: int) -> list[tuple[int, int, bool]]:
    """(first token, tokens, is a prefill) of a sequence's iterations."""
    phase = None if trace.phase is None else trace.phase[start : start + length]
    num_prompt = 0 if phase is None else int((phase == PREFILL).sum())
    prompt = [(start, num_prompt, True)] if num_prompt else []
    return prompt + [(token, 1, False) for token in range(start + num_prompt, start + length)]


def _distribution(
    trace: RoutingTrace, tokens: slice, ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """[n, L, J]"""
    if trace.probs is not None:
        return np.asarray(trace.probs[tokens], np.float32)
    weights = trace.weights[tokens].astype(np.float32)
    probs = np.zeros((*ids.shape[:2], trace.num_experts), np.float32)
    np.put_along_axis(probs, ids, weights / np.maximum(weights.sum(-1, keepdims=True), 1e-9), -1)
    return probs
