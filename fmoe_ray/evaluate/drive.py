"""Drives a step runner from prompts to tokens without scheduler, HTTP or event loop: for checks and
measurements.
"""

from dataclasses import dataclass, field
from typing import Protocol

from fmoe_ray.engine.messages import Row, RowResult, Sampling, StepPlan, StepResult
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.errors import EngineError

GREEDY = Sampling(temperature=0.0)


class Driven(Protocol):
    """A step runner in this process, or the shards of one in several."""

    @property
    def info(self) -> RunnerInfo: ...

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass
class Drive:
    """Runs whole requests on a runner: admits them as slots get free, cuts prompts into chunks."""

    runner: Driven
    chunk: int = 32
    eos: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    steps: int = 0
    results: list[StepResult] = field(default_factory=list)

    def __call__(
        self,
        prompts: list[list[int]],
        num_tokens: int | list[int],
        sampling: list[Sampling] | None = None,
        arrive_at: list[int] | None = None,
    ) -> list[list[int]]:
        """At most `num_tokens` tokens (one number, or one a prompt) for each prompt.

        Request i joins at step `arrive_at[i]` of this call or later.
        """
        limits = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.rows: list[list[RowResult]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        waiting = list(range(len(prompts)))
        slots: dict[int, int] = {}
        free = list(range(self.runner.info.num_slots))
        ended: list[int] = []
        step = 0
        while waiting or slots:
            for request in list(waiting):
                if free and (arrive_at is None or arrive_at[request] <= step):
                    slots[request] = free.pop()
                    waiting.remove(request)
            rows = []
            for request, slot in slots.items():
                sequence = prompts[request] + self.outputs[request]
                tokens = sequence[done[request] :][: self.chunk]
                rows.append(
                    Row(
                        request_id=request,
                        slot=slot,
                        start=done[request],
                        tokens=tokens,
                        samples=done[request] + len(tokens) == len(sequence),
                        sampling=(sampling[request] if sampling else GREEDY)
                        if done[request] == 0
                        else None,
                    )
                )
            result = self.runner.run(StepPlan(step=step, rows=rows, ended=ended))
            if result.error is not None:
                raise EngineError(result.error)
            self.results.append(result)
            ended = []
            for row, outcome in zip(rows, result.rows, strict=True):
                done[row.request_id] += len(row.tokens)
                self.rows[row.request_id].append(outcome)
                if outcome.token is not None:
                    self.outputs[row.request_id].append(outcome.token)
                is_full = len(self.outputs[row.request_id]) == limits[row.request_id]
                if is_full or outcome.token in self.eos:
                    free.append(slots.pop(row.request_id))
                    ended.append(row.request_id)
            step += 1
        self.runner.run(StepPlan(step=step, rows=[], ended=ended))
        return self.outputs
