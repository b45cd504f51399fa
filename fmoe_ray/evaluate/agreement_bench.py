"""Does the simulator predict what the engine does? Both serve the same dialogues by the same policy
behind the same link, an expert's load slow enough that the machine's noise is small beside it.

The engine's routing is recorded once and replayed by the simulator. What that needs to know of the
machine, a layer's compute time and an expert's load time, is measured on other dialogues served
under `lru` in turns with the measured ones: as step minus stall, because after a wait the
processor's caches are cold and a layer takes up to twice as long as with every expert resident; and
as stall by loads, because a busy machine wakes the link's thread late. Decode steps alone are
compared: a prompt's step computes longer than the one layer time that the simulator gives it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle

from fmoe_ray.config import Budget, Settings
from fmoe_ray.engine.messages import StepStats
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.evaluate.dialogues import Dialogues, load_dialogues, record_routing
from fmoe_ray.evaluate.simulator import Simulation, TraceSimulator
from fmoe_ray.evaluate.throttled_engine import (
    ThrottledEngine,
    learned_policy,
    measure_layer,
)
from fmoe_ray.policy import PolicyParts, list_policies
from fmoe_ray.trace.format import RoutingTrace

CALIBRATION_BUDGET = 0.25
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
    nominal_load_ms: float
    """That the link is throttled to."""
    layer_ms: float
    """Measured, given to the simulator."""
    load_ms: float
    """Measured, given to the simulator."""
    simulated_tpot_ms: float
    measured_tpot_ms: float
    simulated_hit_rate: float
    measured_hit_rate: float
    """Of decode and prompts together."""

    @property
    def ratio(self) -> float:
        """Simulated / measured."""
        return self.simulated_tpot_ms / self.measured_tpot_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    layer_s: float
    load_s: float


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
    learned = trace.select(range(seen))
    agreements = []
    for policy, budget in cases or default_cases():
        on_progress(f"{policy}, budget {budget:g}")
        own = _settings_of(settings, policy, budget, resident.info, load_s)
        decode, prefill, machine = _serve(own, dialogues, learned, resident.info, max_tokens)
        simulation = _simulate(own, trace, seen, machine.load_s / machine.layer_s)
        steps = decode + prefill
        asked = sum(step.hits + step.late + step.misses for step in steps)
        agreements.append(
            Agreement(
                policy=policy,
                budget=budget,
                resident_layer_ms=resident.layer_s * 1e3,
                nominal_load_ms=load_ms,
                layer_ms=machine.layer_s * 1e3,
                load_ms=machine.load_s * 1e3,
                simulated_tpot_ms=simulation.time_per_decode_token * machine.layer_s * 1e3,
                measured_tpot_ms=sum(step.seconds for step in decode) / len(decode) * 1e3,
                simulated_hit_rate=simulation.hit_rate,
                measured_hit_rate=sum(step.hits for step in steps) / asked,
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


def _serve(
    settings: Settings,
    dialogues: Dialogues,
    learned: RoutingTrace,
    info: RunnerInfo,
    max_tokens: int,
) -> tuple[list[StepStats], list[StepStats], _Machine]:
    """Decode steps and prompts of the held-out dialogues; the machine while they were served."""
    calibration = settings.offload.model_copy(
        update={"policy": "lru", "budget": Budget(fraction=CALIBRATION_BUDGET)}
    )
    others = dialogues.seen or dialogues.held_out
    prompts = zip(dialogues.held_out, cycle(others), strict=False)
    max_context = max(map(len, dialogues.held_out + others)) + max_tokens

    def start(own: Settings, parts: PolicyParts | None) -> ThrottledEngine:
        return ThrottledEngine(own, max_context=max_context, eos=dialogues.eos, parts=parts)

    with ExitStack() as closing:
        engine = start(settings, learned_policy(settings, info, learned))
        closing.callback(engine.close)
        calibrator = start(settings.model_copy(update={"offload": calibration}), None)
        closing.callback(calibrator.close)
        answers, beside = [], []
        for prompt, other in prompts:
            answers.append(engine.answer(prompt, max_tokens))
            beside += calibrator.answer(other, max_tokens).decode
    decode = [step for answer in answers for step in answer.decode]
    return decode, [answer.prefill for answer in answers], _machine(beside, info)


def _machine(steps: Sequence[StepStats], info: RunnerInfo) -> _Machine:
    stall_s = sum(step.stall_seconds for step in steps)
    num_loads = sum(step.bytes_on_demand for step in steps) / info.expert_bytes
    compute_s = sum(step.seconds for step in steps) - stall_s
    return _Machine(
        layer_s=compute_s / len(steps) / info.num_layers,
        load_s=stall_s / num_loads,
    )
