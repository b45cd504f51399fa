"""Policies side by side: each at every budget and load ratio, with floor and bounds in each row."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fmoe_ray.config import Budget, OffloadSettings
from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.simulator import Bounds, Simulation, TraceSimulator
from fmoe_ray.policy import list_policies
from fmoe_ray.trace.format import RoutingTrace

FLOOR = "lru"
NO_OFFLOAD = "no-offload"
"""Holds every expert, whatever the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared, and how."""

    policies: Sequence[str]
    budgets: Sequence[Budget]
    load_ratios: Sequence[float]
    """Load time of one expert / compute time of one layer."""
    split: float = 0.7
    """The first part of the sequences teaches the predictors; the others are measured."""
    batch: int = 1
    prefetch_distance: int = OffloadSettings().prefetch_distance
    store_capacity: int = OffloadSettings().store_capacity
    num_threads: int = 1
    """Simulations at once; each takes one core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    policy: str
    budget: float
    """Of all experts."""
    slots: int
    load_ratio: float
    simulation: Simulation
    floor: Simulation
    """LRU on the same budget and link."""
    bounds: Bounds

    @property
    def gap_closed(self) -> float | None:
        """(LRU - policy) / (LRU - clairvoyant) in time per token; None where there is no gap."""
        gap = self.floor.time_per_token - self.bounds.clairvoyant
        if gap <= 1e-9 * self.floor.time_per_token:
            return None
        return (self.floor.time_per_token - self.simulation.time_per_token) / gap

    def to_json(self) -> dict[str, Any]:
        simulation = self.simulation
        tokens = simulation.num_tokens
        return {
            "policy": self.policy,
            "budget": self.budget,
            "slots": self.slots,
            "load_ratio": self.load_ratio,
            "time_per_token": simulation.time_per_token,
            "time_per_step": simulation.time / simulation.num_steps,
            "hit_rate": simulation.hit_rate,
            "loads_per_token": simulation.num_loads / tokens,
            "on_demand_per_token": simulation.on_demand_loads / tokens,
            "prefetched_per_token": simulation.prefetch_loads / tokens,
            "wasted_per_token": simulation.prefetches_wasted / tokens,
            "cancelled_per_token": simulation.prefetches_cancelled / tokens,
            "late_per_token": simulation.late / tokens,
            "misses_per_token": simulation.misses / tokens,
            "stall_per_token": simulation.stall / tokens,
            "gap_closed": self.gap_closed,
            "lru": self.floor.time_per_token,
            "belady": self.bounds.belady,
            "clairvoyant": self.bounds.clairvoyant,
            "lower_bound": self.bounds.lower_bound,
            "recall": {
                str(distance): {"top_k": recall.top_k, "top_2k": recall.top_2k}
                for distance, recall in simulation.recall.items()
            },
            "num_tokens": tokens,
            "learn_s": simulation.learn_s,
            "run_s": simulation.run_s,
        }


def compare(
    trace: RoutingTrace,
    comparison: Comparison,
    on_done: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """A row for each budget, load ratio and policy, in this order.

    `on_done` hears of every simulation that ended, num_simulations(comparison) times. Raises
    ConfigError for an unknown policy, a budget in bytes or too small for one token; TraceError
    where the split leaves nothing to measure.
    """
    learned, measured = trace.split(comparison.split)
    simulator = TraceSimulator(trace)
    num_experts = trace.num_layers * trace.num_experts

    def run(policy: str, slots: int, load_ratio: float) -> Simulation:
        simulation = simulator.run(
            policy,
            measured,
            slots=num_experts if policy == NO_OFFLOAD else slots,
            load_ratio=load_ratio,
            learned=learned,
            batch=comparison.batch,
            prefetch_distance=comparison.prefetch_distance,
            store_capacity=comparison.store_capacity,
        )
        on_done(f"{policy}, {slots} of {num_experts} experts, R = {load_ratio:g}")
        return simulation

    def run_bounds(slots: int, load_ratio: float) -> Bounds:
        bounds = simulator.bounds(
            measured, slots=slots, load_ratio=load_ratio, batch=comparison.batch
        )
        on_done(f"bounds, {slots} of {num_experts} experts, R = {load_ratio:g}")
        return bounds

    cells = [
        (_slots(budget, trace), load_ratio)
        for budget in comparison.budgets
        for load_ratio in comparison.load_ratios
    ]
    with ThreadPoolExecutor(comparison.num_threads) as pool:
        simulations = {
            (policy, *cell): pool.submit(run, policy, *cell)
            for cell in cells
            for policy in dict.fromkeys([FLOOR, *comparison.policies])
        }
        bounds = {cell: pool.submit(run_bounds, *cell) for cell in cells}
        _raise_first([*simulations.values(), *bounds.values()])
    return [
        Row(
            policy=policy,
            budget=slots / num_experts,
            slots=slots,
            load_ratio=load_ratio,
            simulation=simulations[policy, slots, load_ratio].result(),
            floor=simulations[FLOOR, slots, load_ratio].result(),
            bounds=bounds[slots, load_ratio].result(),
        )
        for slots, load_ratio in cells
        for policy in comparison.policies
    ]


def blind_policies(trace: RoutingTrace, policies: Sequence[str]) -> list[str]:
    """Those whose predictor sees nothing in this trace: no speculative gates were recorded."""
    if trace.spec_probs is not None:
        return []
    speculative = {info.name for info in list_policies() if info.predictor == "speculative"}
    return [policy for policy in policies if policy in speculative]


def num_simulations(comparison: Comparison) -> int:
    """The bounds count as one."""
    per_cell = len({FLOOR, *comparison.policies}) + 1
    return len(comparison.budgets) * len(comparison.load_ratios) * per_cell


def _slots(budget: Budget, trace: RoutingTrace) -> int:
    if budget.num_bytes is not None or budget.is_automatic:
        raise ConfigError(
            f"budget {budget}: a trace does not know how large an expert is; give a fraction or a "
            "number of experts"
        )
    return budget.slots(
        num_experts=trace.num_layers * trace.num_experts, expert_bytes=1, min_slots=trace.top_k
    )


def _raise_first(futures: Sequence[Future[Any]]) -> None:
    """Waits for all; after a failure those that have not begun are not begun."""
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise
