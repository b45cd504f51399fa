"""The engine on a CPU behind a slow link, one request at a time: what policies are measured on.

The link's rate is chosen so that an expert takes a set time to load, measured in layers of this
machine. Timings mean something only beside others of the same run.
"""

import statistics
from dataclasses import dataclass

from fmoe_ray.config import Budget, Settings
from fmoe_ray.engine.messages import StepStats
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.drive import Drive
from fmoe_ray.evaluate.simulator import TraceSimulator
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.policy import Geometry, PolicyParts, make_policy
from fmoe_ray.trace.format import RoutingTrace

WARM_UP_PROMPTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request, computed alone."""

    tokens: list[int]
    prefill: StepStats
    decode: list[StepStats]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    layer_s: float
    """Median decode step with every expert resident / number of layers."""
    info: RunnerInfo


class ThrottledEngine:
    """A step runner for one request at a time. Close it."""

    def __init__(
        self,
        settings: Settings,
        *,
        max_context: int,
        eos: frozenset[int],
        parts: PolicyParts | None = None,
    ) -> None:
        """Raises ConfigError for a GPU: only the CPU's link can be slowed down."""
        if settings.model.device == "cuda":
            raise ConfigError("model.device cuda: only a CPU's link can be throttled; set cpu")
        self._runner = StepRunner.load(_one_at_a_time(settings, max_context), policy_parts=parts)
        self._max_context = max_context
        self._eos = eos

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        """Greedy; ends at a token of `eos`. Raises EngineError if a step fails."""
        drive = Drive(self._runner, chunk=self._max_context, eos=self._eos)
        (tokens,) = drive([prompt], max_tokens)
        prefill, *decode = [result.stats for result in drive.results]
        return Answer(tokens=tokens, prefill=prefill, decode=decode)

    def close(self) -> None:
        try:
            self._runner.check_integrity()
        finally:
            self._runner.shutdown()


def measure_layer(
    settings: Settings,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    eos: frozenset[int],
) -> LayerTime:
    """On these prompts, after two of them to warm up."""
    offload = settings.offload.model_copy(
        update={"policy": "lru", "budget": Budget(fraction=1.0), "link_gbps": None}
    )
    max_context = max(map(len, prompts)) + max_tokens
    engine = ThrottledEngine(
        settings.model_copy(update={"offload": offload}), max_context=max_context, eos=eos
    )
    try:
        for prompt in prompts[:WARM_UP_PROMPTS]:
            engine.answer(prompt, max_tokens)
        answers = [engine.answer(prompt, max_tokens) for prompt in prompts]
        seconds = [step.seconds for answer in answers for step in answer.decode]
        info = engine.info
    finally:
        engine.close()
    return LayerTime(layer_s=statistics.median(seconds) / info.num_layers, info=info)


def learned_policy(
    settings: Settings, info: RunnerInfo | LoadedModel, trace: RoutingTrace | None
) -> PolicyParts:
    """The settings' policy, its predictor taught by the trace: the very events that the engine
    would have shown it while it served those requests, in half precision.
    """
    slots = settings.offload.budget.slots(
        num_experts=info.num_layers * info.num_experts,
        expert_bytes=info.expert_bytes,
        min_slots=info.top_k,
    )
    parts = make_policy(
        settings.offload.policy,
        geometry=Geometry(info.num_layers, info.num_experts, info.top_k),
        num_slots=slots,
        prefetch_distance=settings.offload.prefetch_distance,
        store_capacity=settings.offload.store_capacity,
        embedding_size=0
        if trace is None or trace.embeddings is None
        else trace.embeddings.shape[1],
        eviction=settings.offload.eviction if settings.offload.policy != "no-offload" else "policy",
    )
    if trace is not None and parts.predictor is not None:
        TraceSimulator(trace).teach(parts.predictor, trace.sequences())
    return parts


def _one_at_a_time(settings: Settings, max_context: int) -> Settings:
    offload = settings.offload.model_copy(update={"store_path": None, "record_path": None})
    model = settings.model.model_copy(update={"device": "cpu"})
    engine = settings.engine.model_copy(update={"max_batch_size": 1, "max_context": max_context})
    return settings.model_copy(update={"model": model, "offload": offload, "engine": engine})
