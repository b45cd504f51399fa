"""What the engine's numbers are called, and how they are written as Prometheus text.

Actors hand the same numbers to Ray under the same names.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

from fmoe_ray.engine.engine import EngineHealth
from fmoe_ray.engine.messages import StepPlan, StepResult, StepStats
from fmoe_ray.engine.request import Usage
from fmoe_ray.engine.runner import RunnerInfo

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


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter: its name, without the `_total` of the text format, and its one label."""

    name: str
    label: str | None = None
    value: str = ""

    def __str__(self) -> str:
        labels = "" if self.label is None else f'{{{self.label}="{self.value}"}}'
        return f"{self.name}_total{labels}"


def count_step(stats: StepStats) -> dict[Sample, float]:
    """What a step adds to each counter."""
    return {
        Sample("fmoe_steps"): 1,
        Sample("fmoe_experts", "result", "hit"): stats.hits,
        Sample("fmoe_experts", "result", "late"): stats.late,
        Sample("fmoe_experts", "result", "miss"): stats.misses,
        Sample("fmoe_bytes", "cause", "on_demand"): stats.bytes_on_demand,
        # A prefetch is counted when its fate is known, used or wasted, and as soon as it has moved.
        Sample("fmoe_bytes", "cause", "prefetch_used"): stats.bytes_prefetch_used,
        Sample("fmoe_bytes", "cause", "prefetch_wasted"): stats.bytes_prefetch_wasted,
        Sample("fmoe_bytes_prefetched"): stats.bytes_prefetched,
        Sample("fmoe_stall_seconds"): stats.stall_seconds,
        # Their quotient is the mean similarity of what predictions were made from.
        Sample("fmoe_predictions"): stats.num_predictions,
        Sample("fmoe_prediction_score"): stats.prediction_score,
    }


def count_request(reason: str, usage: Usage) -> dict[Sample, float]:
    """What the end of a request adds to each counter."""
    return {
        Sample("fmoe_requests", "finish_reason", reason): 1,
        Sample("fmoe_prompt_tokens"): usage.prompt_tokens,
        Sample("fmoe_generated_tokens"): usage.completion_tokens,
    }


def request_times(usage: Usage) -> dict[str, float]:
    """What the end of a request adds to each histogram, in seconds."""
    times = {"fmoe_queue_seconds": usage.queue_s}
    if usage.completion_tokens > 0:
        times["fmoe_ttft_seconds"] = usage.ttft_s
    if usage.completion_tokens > 1:
        times["fmoe_tpot_seconds"] = usage.tpot_s
    return times


REQUEST_BUCKETS = {
    "fmoe_queue_seconds": TTFT_BUCKETS_S,
    "fmoe_ttft_seconds": TTFT_BUCKETS_S,
    "fmoe_tpot_seconds": TPOT_BUCKETS_S,
}


class PrometheusObserver:
    """An EngineObserver whose totals `render` writes down."""

    def __init__(self) -> None:
        self._totals: defaultdict[Sample, float] = defaultdict(float)
        self._histograms = {
            name: _Histogram(bounds)
            for name, bounds in {**REQUEST_BUCKETS, "fmoe_batch_size": BATCH_BUCKETS}.items()
        }
        self._num_maps = 0

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        self._count(count_step(result.stats))
        self._histograms["fmoe_batch_size"].observe(len(plan.rows))
        self._num_maps = result.stats.num_maps

    def request_ended(self, reason: str, usage: Usage) -> None:
        self._count(count_request(reason, usage))
        for name, seconds in request_times(usage).items():
            self._histograms[name].observe(seconds)

    def render(self, health: EngineHealth, info: RunnerInfo) -> str:
        """Prometheus text format 0.0.4."""
        gauges = {
            "fmoe_requests_running": health.num_running,
            "fmoe_requests_waiting": health.num_waiting,
            "fmoe_kv_slots": info.num_slots,
            "fmoe_kv_slots_free": health.num_free_slots,
            "fmoe_expert_slots": info.expert_slots,
            "fmoe_store_maps": self._num_maps,
        }
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        typed: set[str] = set()
        for sample in sorted(self._totals, key=str):
            if sample.name not in typed:
                typed.add(sample.name)
                lines.append(f"# TYPE {sample.name}_total counter")
            lines.append(f"{sample} {self._totals[sample]:.10g}")
        for name, histogram in self._histograms.items():
            lines += histogram.lines(name)
        return "\n".join(lines) + "\n"

    def _count(self, counts: dict[Sample, float]) -> None:
        for sample, value in counts.items():
            self._totals[sample] += value
