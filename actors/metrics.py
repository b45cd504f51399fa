"""The engine's numbers as Ray metrics: Ray exports them as `ray_fmoe_*` on each node."""

import time

from ray.serve.metrics import Counter, Gauge, Histogram

from fmoe_ray.api.metrics import (
    REQUEST_BUCKETS,
    Sample,
    count_request,
    count_step,
    request_times,
)
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.request import Usage
from fmoe_ray.engine.runner import RunnerInfo

_EVERY_S = 1.0  # Ray's metrics cost microseconds a call, too much for every step


class RayObserver:
    """An EngineObserver. Steps are summed up and handed to Ray once a second, and when a request
    ends.
    """

    def __init__(self, model_name: str, info: RunnerInfo) -> None:
        # Ray's exporter knows ASCII only.
        self._tags = {"model": model_name.encode("ascii", "backslashreplace").decode()}
        self._info = info
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms = {
            name: Histogram(name, boundaries=list(bounds), tag_keys=("model",))
            for name, bounds in REQUEST_BUCKETS.items()
        }
        self._pending: dict[Sample, float] = {}
        self._handed_over_s = 0.0

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        self._add(count_step(result.stats))
        if time.monotonic() - self._handed_over_s < _EVERY_S:
            return
        # Ray forgets a gauge with every export.
        self._set(
            {
                "fmoe_expert_slots": self._info.expert_slots,
                "fmoe_kv_slots": self._info.num_slots,
                "fmoe_batch_size": len(plan.rows),
                "fmoe_requests_waiting": num_waiting,
                "fmoe_store_maps": result.stats.num_maps,
            }
        )
        self._hand_over()

    def request_ended(self, reason: str, usage: Usage) -> None:
        self._add(count_request(reason, usage))
        for name, seconds in request_times(usage).items():
            self._histograms[name].observe(seconds, self._tags)
        self._hand_over()

    def _add(self, counts: dict[Sample, float]) -> None:
        for sample, value in counts.items():
            self._pending[sample] = self._pending.get(sample, 0.0) + value

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, {}
        self._handed_over_s = time.monotonic()
        for sample, value in pending.items():
            if value > 0:
                self._counter(sample).inc(value, self._tags_of(sample))

    def _counter(self, sample: Sample) -> Counter:
        if sample.name not in self._counters:
            self._counters[sample.name] = Counter(
                sample.name, tag_keys=tuple(self._tags_of(sample))
            )
        return self._counters[sample.name]

    def _tags_of(self, sample: Sample) -> dict[str, str]:
        return self._tags if sample.label is None else {**self._tags, sample.label: sample.value}

    def _set(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, tag_keys=("model",))
            self._gauges[name].set(value, self._tags)
