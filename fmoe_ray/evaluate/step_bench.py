"""How long a decode step takes here, everything resident, beside the same transformers forward.

Measured in one run, in turns, so that a noisy machine disturbs both alike; only the ratios mean
anything elsewhere.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fmoe_ray.config import Budget, EngineSettings, ModelSettings, OffloadSettings, Settings
from fmoe_ray.engine.messages import Row, StepPlan
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import EngineError
from fmoe_ray.evaluate.drive import GREEDY
from fmoe_ray.models.checkpoint import resolve

EXPERTS = ("eager", "grouped_mm")
"""transformers' own experts implementations to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Medians over the steps of one batch size; times are of one decode step."""

    batch_size: int
    context: int
    steps: int
    num_threads: int
    step_ms: float
    transformers_ms: dict[str, float]
    ratio: dict[str, float]
    """Our time through transformers', step by step: the median of the quotients."""


def measure_steps(
    path: str, *, batch_size: int, context: int = 64, steps: int = 20, num_threads: int = 2
) -> StepTimes:
    """Decodes `steps` tokens greedily for `batch_size` prompts of `context` tokens, both ways.

    Raises ModelError, CapacityError, EngineError if a step fails.
    """
    torch.set_num_threads(num_threads)
    settings = Settings(
        model=ModelSettings(path=path, device="cpu", dtype="float32"),
        offload=OffloadSettings(policy="lru", budget=Budget()),
        engine=EngineSettings(
            max_batch_size=batch_size, max_context=context + steps + 1, num_threads=num_threads
        ),
    )
    runner = StepRunner.load(settings)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(runner.info.vocab_size, (batch_size, context), generator=generator)
    try:
        ways: dict[str, Callable[[], None]] = {"fmoe": _Ours(runner, prompts.tolist())}
        for experts in EXPERTS:
            ways[experts] = _Theirs(path, experts, prompts)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(steps):
            for name, step in ways.items():
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    finally:
        runner.shutdown()
    ours = seconds.pop("fmoe")
    return StepTimes(
        batch_size=batch_size,
        context=context,
        steps=steps,
        num_threads=num_threads,
        step_ms=statistics.median(ours) * 1e3,
        transformers_ms={n: statistics.median(theirs) * 1e3 for n, theirs in seconds.items()},
        ratio={
            name: statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            for name, theirs in seconds.items()
        },
    )


class _Ours:
    """Prefills on creation; each call is a decode step of all rows."""

    def __init__(self, runner: StepRunner, prompts: list[list[int]]) -> None:
        self._runner = runner
        self._start = 0
        self._tokens = prompts
        self()

    def __call__(self) -> None:
        rows = [
            Row(
                request_id=number,
                slot=number,
                start=self._start,
                tokens=tokens,
                samples=True,
                sampling=GREEDY,
            )
            for number, tokens in enumerate(self._tokens)
        ]
        result = self._runner.run(StepPlan(step=self._start, rows=rows))
        if result.error is not None:
            raise EngineError(result.error)
        self._start += len(self._tokens[0])
        self._tokens = [[row.token] for row in result.rows if row.token is not None]


class _Theirs:
    """As `_Ours`, with transformers' model and cache."""

    def __init__(self, path: str, experts: str, prompts: torch.Tensor) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            resolve(path), dtype=torch.float32, experts_implementation=experts
        ).eval()
        self._cache: Any = None
        self._tokens = prompts
        self()

    @torch.inference_mode()
    def __call__(self) -> None:
        output = self._model(input_ids=self._tokens, cache=self._cache, use_cache=True)
        self._cache = output.cache
        self._tokens = output.logits[:, -1:].argmax(-1)
