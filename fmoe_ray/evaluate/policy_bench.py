"""Every policy in the engine, on a CPU with a slow link, on the same dialogues after the same seen.

What was seen is recorded once and shown to each policy's predictor. The policies take turns,
dialogue by dialogue, so that a noisy machine disturbs all alike.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fmoe_ray.config import Budget, Settings
from fmoe_ray.engine.messages import StepStats
from fmoe_ray.errors import EngineError
from fmoe_ray.evaluate.dialogues import load_dialogues, record_routing
from fmoe_ray.evaluate.policy_table import NO_OFFLOAD
from fmoe_ray.evaluate.throttled_engine import (
    Answer,
    ThrottledEngine,
    learned_policy,
    measure_layer,
)
from fmoe_ray.policy import list_policies
from fmoe_ray.trace.format import RoutingTrace

LAYER_PROMPTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What all policies were measured under."""

    seen: int
    held_out: int
    max_tokens: int
    budget: str
    load_ratio: float
    """Load time of an expert / compute time of a layer, asked for."""
    layer_ms: float
    """Measured: a resident decode step / number of layers."""
    load_ms: float
    link_gbps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """Of the decode steps of all held-out dialogues, where not said otherwise."""

    policy: str
    hit_rate: float
    late_rate: float
    """Requested before the gate asked, but not ready yet."""
    stall_ms: float
    """Per token."""
    tpot_ms: float
    tpot_median_ms: float
    """Of single steps: less disturbed where the machine is busy."""
    ttft_ms: float
    """Mean time of a prompt's step."""
    prefill_hit_rate: float
    prefetched_bytes: float
    """Per token."""
    num_tokens: int
    tokens_sha256: str
    """Of all tokens of all answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBench:
    conditions: Conditions
    policies: list[PolicyResult]


def bench_policies(
    settings: Settings,
    *,
    seen: int = 300,
    held_out: int = 30,
    max_tokens: int = 16,
    policies: Sequence[str] = (),
    load_ratio: float = 0.5,
    seen_trace: RoutingTrace | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> PolicyBench:
    """All policies if none is named. `seen_trace` is the seen dialogues' routing where it was
    recorded before. Raises ConfigError, ModelError, CapacityError; EngineError where policies
    answer differently.
    """
    names = list(policies) or [info.name for info in list_policies()]
    dialogues = load_dialogues(settings, seen=seen, held_out=held_out)
    max_context = max(map(len, dialogues.held_out)) + max_tokens
    on_progress("measuring a layer")
    layer = measure_layer(
        settings, dialogues.held_out[:LAYER_PROMPTS], max_tokens=max_tokens, eos=dialogues.eos
    )
    load_s = load_ratio * layer.layer_s
    link_gbps = layer.info.expert_bytes / load_s * 1e-9
    if seen_trace is None and seen > 0:
        on_progress(f"recording {seen} seen dialogues")
        seen_trace = record_routing(
            settings, dialogues.seen, max_tokens=max_tokens, eos=dialogues.eos
        )
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    with ExitStack() as closing:
        engines = {}
        for name in names:
            on_progress(f"teaching {name}")
            own = _settings_of(name, settings, link_gbps)
            engines[name] = ThrottledEngine(
                own,
                max_context=max_context,
                eos=dialogues.eos,
                parts=learned_policy(own, layer.info, seen_trace),
            )
            closing.callback(engines[name].close)
        for number, prompt in enumerate(dialogues.held_out, start=1):
            on_progress(f"dialogue {number} of {held_out}")
            for name, engine in engines.items():
                answers[name].append(engine.answer(prompt, max_tokens))
    results = [_result(name, answers[name]) for name in names]
    _require_equal_tokens(results)
    return PolicyBench(
        conditions=Conditions(
            seen=seen,
            held_out=held_out,
            max_tokens=max_tokens,
            budget=str(settings.offload.budget),
            load_ratio=load_ratio,
            layer_ms=layer.layer_s * 1e3,
            load_ms=load_s * 1e3,
            link_gbps=link_gbps,
        ),
        policies=results,
    )


def _settings_of(policy: str, settings: Settings, link_gbps: float) -> Settings:
    changes: dict[str, object] = {"policy": policy, "link_gbps": link_gbps}
    if policy == NO_OFFLOAD:
        changes["budget"] = Budget(fraction=1.0)
    return settings.model_copy(update={"offload": settings.offload.model_copy(update=changes)})


def _result(policy: str, answers: Sequence[Answer]) -> PolicyResult:
    decode = [step for answer in answers for step in answer.decode]
    prefill = [answer.prefill for answer in answers]
    tokens = json.dumps([answer.tokens for answer in answers])
    return PolicyResult(
        policy=policy,
        hit_rate=_hit_rate(decode),
        late_rate=sum(step.late for step in decode) / _num_asked(decode),
        stall_ms=sum(step.stall_seconds for step in decode) / len(decode) * 1e3,
        tpot_ms=sum(step.seconds for step in decode) / len(decode) * 1e3,
        tpot_median_ms=statistics.median(step.seconds for step in decode) * 1e3,
        ttft_ms=sum(step.seconds for step in prefill) / len(prefill) * 1e3,
        prefill_hit_rate=_hit_rate(prefill),
        prefetched_bytes=sum(step.bytes_prefetched for step in decode) / len(decode),
        num_tokens=sum(len(answer.tokens) for answer in answers),
        tokens_sha256=hashlib.sha256(tokens.encode()).hexdigest(),
    )


def _hit_rate(steps: Sequence[StepStats]) -> float:
    return sum(step.hits for step in steps) / _num_asked(steps)


def _num_asked(steps: Sequence[StepStats]) -> int:
    return sum(step.hits + step.late + step.misses for step in steps)


def _require_equal_tokens(results: Sequence[PolicyResult]) -> None:
    by_hash: dict[str, list[str]] = {}
    for result in results:
        by_hash.setdefault(result.tokens_sha256, []).append(result.policy)
    if len(by_hash) > 1:
        groups = "; ".join(", ".join(policies) for policies in by_hash.values())
        raise EngineError(f"offloading changed tokens: these answer differently: {groups}")
