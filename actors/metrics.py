"""The engine's numbers as Ray metrics: Ray exports them as `ray_fmoe_*` on each node."""

import time

from ray.serve.metrics import Counter, Gauge, Histogram

from fmoe_ray.api.metrics import TPOT_BUCKETS_S, TTFT_BUCKETS_S
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.request import Usage

_EVERY_S = 1.0  # Ray's metrics cost microseconds a call, too much for every step


class RayObserver:
    """An EngineObserver. Steps are summed up and handed to Ray once a second."""

    def __init__(self, model_name: str) -> None:
        self._tags = {"model": model_name}
        self._requests = Counter("fmoe_requests", tag_keys=("model", "finish_reason"))
        self._tokens = Counter("fmoe_tokens", tag_keys=("model", "kind"))
        self._experts = Counter("fmoe_experts", tag_keys=("model", "result"))
        self._bytes = Counter("fmoe_bytes", tag_keys=("model", "cause"))
        self._stall = Counter("fmoe_stall_seconds", tag_keys=("model",))
        self._running = Gauge("fmoe_batch_size", tag_keys=("model",))
        self._waiting = Gauge("fmoe_requests_waiting", tag_keys=("model",))
        self._ttft = _histogram("fmoe_ttft_seconds", TTFT_BUCKETS_S)
        self._tpot = _histogram("fmoe_tpot_seconds", TPOT_BUCKETS_S)
        self._queue = _histogram("fmoe_queue_seconds", TTFT_BUCKETS_S)
        self._pending: dict[str, float] = {}
        self._handed_over_s = 0.0

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        stats = result.stats
        for name, value in (
            ("hit", stats.hits),
            ("late", stats.late),
            ("miss", stats.misses),
            ("on_demand", stats.bytes_on_demand),
            ("prefetch", stats.bytes_prefetched),
            ("stall", stats.stall_seconds),
        ):
            self._pending[name] = self._pending.get(name, 0.0) + value
        if time.monotonic() - self._handed_over_s >= _EVERY_S:
            self._running.set(len(plan.rows), self._tags)
            self._waiting.set(num_waiting, self._tags)
            self._hand_over()

    def request_ended(self, reason: str, usage: Usage) -> None:
        self._requests.inc(1, {**self._tags, "finish_reason": reason})
        self._queue.observe(usage.queue_s, self._tags)
        for kind, count in (("prompt", usage.prompt_tokens), ("answer", usage.completion_tokens)):
            if count > 0:
                self._tokens.inc(count, {**self._tags, "kind": kind})
        if usage.completion_tokens > 0:
            self._ttft.observe(usage.ttft_s, self._tags)
        if usage.completion_tokens > 1:
            self._tpot.observe(usage.tpot_s, self._tags)
        self._hand_over()

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, {}
        self._handed_over_s = time.monotonic()
        for name, value in pending.items():
            if value <= 0:
                continue
            if name == "stall":
                self._stall.inc(value, self._tags)
            elif name in ("on_demand", "prefetch"):
                self._bytes.inc(value, {**self._tags, "cause": name})
            else:
                self._experts.inc(value, {**self._tags, "result": name})


def _histogram(name: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(name, boundaries=list(bounds), tag_keys=("model",))
