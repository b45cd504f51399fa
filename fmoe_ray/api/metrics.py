"""Counts what the engine does and writes it as Prometheus text."""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

from fmoe_ray.engine.engine import EngineHealth
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.request import Usage

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        below = list(accumulate(self.counts))
        bounds = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        lines = [
            f'{name}_bucket{{le="{bound}"}} {count}'
            for bound, count in zip(bounds, below, strict=True)
        ]
        return [
            f"# TYPE {name} histogram",
            *lines,
            f"{name}_sum {self.total:g}",
            f"{name}_count {below[-1]}",
        ]


class PrometheusObserver:
    """An EngineObserver whose totals `render` writes down."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._histograms = {
            "fmoe_ttft_seconds": _Histogram(TTFT_BUCKETS_S),
            "fmoe_tpot_seconds": _Histogram(TPOT_BUCKETS_S),
            "fmoe_queue_seconds": _Histogram(TTFT_BUCKETS_S),
            "fmoe_batch_size": _Histogram(BATCH_BUCKETS),
        }

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        stats, totals = result.stats, self._totals
        totals["fmoe_steps_total"] += 1
        totals['fmoe_experts_total{result="hit"}'] += stats.hits
        totals['fmoe_experts_total{result="late"}'] += stats.late
        totals['fmoe_experts_total{result="miss"}'] += stats.misses
        totals['fmoe_bytes_total{cause="on_demand"}'] += stats.bytes_on_demand
        totals['fmoe_bytes_total{cause="prefetch"}'] += stats.bytes_prefetched
        totals["fmoe_stall_seconds_total"] += stats.stall_seconds
        self._histograms["fmoe_batch_size"].observe(len(plan.rows))

    def request_ended(self, reason: str, usage: Usage) -> None:
        self._totals[f'fmoe_requests_total{{finish_reason="{reason}"}}'] += 1
        self._totals["fmoe_prompt_tokens_total"] += usage.prompt_tokens
        self._totals["fmoe_generated_tokens_total"] += usage.completion_tokens
        self._histograms["fmoe_queue_seconds"].observe(usage.queue_s)
        if usage.completion_tokens > 0:
            self._histograms["fmoe_ttft_seconds"].observe(usage.ttft_s)
        if usage.completion_tokens > 1:
            self._histograms["fmoe_tpot_seconds"].observe(usage.tpot_s)

    def render(self, health: EngineHealth) -> str:
        """Prometheus text format 0.0.4."""
        gauges = {
            "fmoe_requests_running": health.num_running,
            "fmoe_requests_waiting": health.num_waiting,
            "fmoe_kv_slots_free": health.num_free_slots,
        }
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        typed: set[str] = set()
        for name in sorted(self._totals):
            family = name.partition("{")[0]
            if family not in typed:
                typed.add(family)
                lines.append(f"# TYPE {family} counter")
            lines.append(f"{name} {self._totals[name]:.10g}")
        for name, histogram in self._histograms.items():
            lines += histogram.lines(name)
        return "\n".join(lines) + "\n"
