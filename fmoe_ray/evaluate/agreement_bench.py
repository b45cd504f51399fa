"""Does the simulator predict what the engine does? Both serve the same dialogues by the same policy
behind the same link, an expert's load slow enough that the machine's noise is small beside it.

The engine's routing is recorded once. The simulator replays it with the engine's own layer time.
That is measured on other dialogues while the engine waits for experts in between, as step minus
stall: after a wait the processor's caches are cold, and a layer takes up to twice as long as in a
resident run, whose time is reported beside it. Decode steps alone are compared: a prompt's step
computes longer than the one layer time that the simulator gives it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmoe_ray.config import Budget, Settings
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.evaluate.dialogues import Dialogues, load_dialogues, record_routing
from fmoe_ray.evaluate.simulator import Simulation, TraceSimulator
from fmoe_ray.evaluate.throttled_engine import (
    LayerTime,
    ThrottledEngine,
    learned_policy,
    measure_layer,
)
from fmoe_ray.policy import list_policies
from fmoe_ray.trace.format import RoutingTrace

CALIBRATION_DIALOGUES = 4
CHUNKS_PER_EXPERT = 8
"""The simulator lets an on-demand load overtake at once, so small chunks come near to it; but each
costs a wake-up of the link's thread, which on a busy machine is late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One policy at one budget; times of a decode step, in ms."""

    policy: str
    budget: float
    resident_layer_ms: float
    """With every expert resident."""
    layer_ms: float
    """Given to the simulator."""
    load_ms: float
    simulated_tpot_ms: float
    measured_tpot_ms: float
    simulated_hit_rate: float
    measured_hit_rate: float
    """Of decode and prompts together."""

    @property
    def ratio(self) -> float:
        """Simulated / measured."""
        return self.simulated_tpot_ms / self.measured_tpot_ms


def default_cases() -> list[tuple[str, float]]:
    """(policy, budget) of the three settings compared."""
    names = [info.name for info in list_policies()]
    return [("lru", 0.25), ("fmoe", 0.25), ("fmoe+" if "fmoe+" in names else "ema", 0.5)]


def bench_agreement(
    settings: Settings,
    *,
    cases: Sequence[tuple[str, float]] = (),
    load_ms: float = 5.0,
    seen: int = 100,
    held_out: int = 10,
    max_tokens: int = 16,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[Agreement]:
    """`settings` name the model. Raises ConfigError, ModelError, CapacityError, EngineError."""
    dialogues = load_dialogues(settings, seen=seen, held_out=held_out)
    on_progress("measuring a layer")
    load_s = load_ms * 1e-3
    resident = measure_layer(
        settings, dialogues.held_out[:8], max_tokens=max_tokens, eos=dialogues.eos
    )
    on_progress("recording the routing")
    trace = record_routing(
        settings,
        dialogues.seen + dialogues.held_out,
        max_tokens=max_tokens,
        eos=dialogues.eos,
    )
    on_progress("measuring a layer between waits")
    layer_s = _layer_between_waits(settings, dialogues, resident, load_s, max_tokens)
    agreements = []
    for policy, budget in cases or default_cases():
        on_progress(f"{policy}, budget {budget:g}")
        own = _settings_of(settings, policy, budget, resident.info, load_s)
        simulation = _simulate(own, trace, seen, load_s / layer_s)
        learned = trace.select(range(seen))
        tpot_s, hit_rate = _measure(own, dialogues, learned, resident.info, max_tokens)
        agreements.append(
            Agreement(
                policy=policy,
                budget=budget,
                resident_layer_ms=resident.layer_s * 1e3,
                layer_ms=layer_s * 1e3,
                load_ms=load_ms,
                simulated_tpot_ms=simulation.time_per_decode_token * layer_s * 1e3,
                measured_tpot_ms=tpot_s * 1e3,
                simulated_hit_rate=simulation.hit_rate,
                measured_hit_rate=hit_rate,
            )
        )
    return agreements


def _settings_of(
    settings: Settings, policy: str, budget: float, info: RunnerInfo, load_s: float
) -> Settings:
    offload = settings.offload.model_copy(
        update={
            "policy": policy,
            "budget": Budget(fraction=budget),
            "link_gbps": info.expert_bytes / load_s * 1e-9,
            "chunk_bytes": max(1, info.expert_bytes // CHUNKS_PER_EXPERT),
        }
    )
    return settings.model_copy(update={"offload": offload})


def _layer_between_waits(
    settings: Settings, dialogues: Dialogues, resident: LayerTime, load_s: float, max_tokens: int
) -> float:
    """Mean seconds of a decode step without its stall / number of layers."""
    prompts = dialogues.seen[:CALIBRATION_DIALOGUES] or dialogues.held_out[:CALIBRATION_DIALOGUES]
    engine = ThrottledEngine(
        _settings_of(settings, "lru", 0.25, resident.info, load_s),
        max_context=max(map(len, prompts)) + max_tokens,
        eos=dialogues.eos,
    )
    try:
        answers = [engine.answer(prompt, max_tokens) for prompt in prompts]
    finally:
        engine.close()
    decode = [step for answer in answers for step in answer.decode]
    compute_s = sum(step.seconds - step.stall_seconds for step in decode) / len(decode)
    return compute_s / resident.info.num_layers


def _simulate(settings: Settings, trace: RoutingTrace, seen: int, load_ratio: float) -> Simulation:
    offload = settings.offload
    sequences = trace.sequences()
    return TraceSimulator(trace).run(
        offload.policy,
        sequences[seen:],
        slots=offload.budget.slots(
            num_experts=trace.num_layers * trace.num_experts,
            expert_bytes=1,
            min_slots=trace.top_k,
        ),
        load_ratio=load_ratio,
        learned=sequences[:seen],
        eviction=offload.eviction,
        prefetch_distance=offload.prefetch_distance,
        store_capacity=offload.store_capacity,
        prefetch_depth=offload.prefetch_depth,
    )


def _measure(
    settings: Settings,
    dialogues: Dialogues,
    learned: RoutingTrace,
    info: RunnerInfo,
    max_tokens: int,
) -> tuple[float, float]:
    """Mean seconds of a decode step, and the hit rate of all steps."""
    engine = ThrottledEngine(
        settings,
        max_context=max(map(len, dialogues.held_out)) + max_tokens,
        eos=dialogues.eos,
        parts=learned_policy(settings, info, learned),
    )
    try:
        answers = [engine.answer(prompt, max_tokens) for prompt in dialogues.held_out]
    finally:
        engine.close()
    decode = [step for answer in answers for step in answer.decode]
    steps = decode + [answer.prefill for answer in answers]
    asked = sum(step.hits + step.late + step.misses for step in steps)
    return (
        sum(step.seconds for step in decode) / len(decode),
        sum(step.hits for step in steps) / asked,
    )
