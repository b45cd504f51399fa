"""Who computes what in the next step: continuous batching over KV slots.

Pure: no clock, no waiting, no torch. The engine asks for a plan, has it carried out and hands the
result back; one step is in flight at a time.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from fmoe_ray.engine.detokenizer import Detokenizer, StopStrings
from fmoe_ray.engine.messages import Row, RowResult, StepPlan, StepResult
from fmoe_ray.engine.request import Event, FinishReason, GenerationRequest
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.engine.sequence import Sequence
from fmoe_ray.engine.tokenizer import Tokenizer
from fmoe_ray.errors import (
    DeadlineError,
    EngineError,
    FmoeError,
    InvalidRequestError,
    OverloadedError,
)

Events = list[tuple[int, Event]]
"""(request id, event), in the order of the rows."""


class Scheduler:
    """Admits requests in order of arrival, one KV slot each, and decides when they end.

    A step decodes every running request and prefills waiting ones, up to `max_prefill_tokens`
    prompt tokens. A prompt is computed in one step unless it is longer than that; then it is cut
    at multiples of `max_prefill_tokens`, whatever else is going on, so that the same prompt is
    always computed in the same pieces.
    """

    def __init__(self, info: RunnerInfo, tokenizer: Tokenizer, *, max_waiting: int) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._num_submitted = 0
        self._num_steps = 0
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._free_slots = list(range(info.num_slots))
        self._ended: list[int] = []
        self._in_flight: StepPlan | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_tokens(self) -> int:
        """Of requests in flight: what lies in KV slots, or will once their prompts are computed."""
        prompts = sum(len(sequence.request.prompt) for sequence in self._waiting)
        running = self._running.values()
        return prompts + sum(max(len(s.request.prompt), s.num_computed) for s in running)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def check(self, *requests: GenerationRequest) -> None:
        """Whether all of them could be queued now, one after the other.

        Raises InvalidRequestError for a prompt that does not fit, OverloadedError if too many wait.
        """
        for request in requests:
            self._check_prompt(request.prompt)
        room = len(self._free_slots) + self._max_waiting - len(self._waiting)
        if len(requests) > room:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait already (engine.max_waiting is "
                f"{self._max_waiting}); try again later",
                code="overloaded",
            )

    def submit(self, request: GenerationRequest, *, now: float, timeout_s: float) -> int:
        """Queues a request and returns its id. Raises as `check`."""
        self.check(request)
        self._num_submitted += 1
        sequence = Sequence(
            request_id=self._num_submitted,
            request=request,
            detokenizer=Detokenizer(self._tokenizer.decode),
            stops=StopStrings(request.stop),
            submitted_s=now,
            deadline_s=now + timeout_s,
        )
        self._waiting.append(sequence)
        return sequence.request_id

    def cancel(self, request_id: int) -> Events:
        """Ends a request. If it is being computed, the result of that step ends it."""
        return self._end_early(request_id, "cancelled", None)

    def expire(self, now: float) -> Events:
        """Ends what has passed its deadline. Call between steps."""
        assert self._in_flight is None, "a step is in flight"
        late = [sequence for sequence in self._sequences() if now >= sequence.deadline_s]
        events: Events = []
        for sequence in late:
            seconds = sequence.deadline_s - sequence.submitted_s
            error = DeadlineError(
                f"the request took longer than {seconds:g} s (engine.request_timeout_s); "
                f"{sequence.num_generated} tokens were generated",
                code="timeout",
            )
            events += self._end_early(sequence.request_id, "error", error)
        return events

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        assert self._in_flight is None, "a step is in flight"
        rows = list(self._plan_rows(now))
        if not rows:
            return None
        self._num_steps += 1
        ended, self._ended = self._ended, []
        self._in_flight = StepPlan(step=self._num_steps, rows=rows, ended=ended)
        return self._in_flight

    def take(self, result: StepResult, now: float) -> Events:
        """Takes the answer to the plan in flight; frees the slots of what ends with it.

        Raises EngineError if the answer belongs to another plan.
        """
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "no step is in flight"
        if result.error is not None:
            return self._fail_rows(plan.rows, EngineError(result.error))
        planned = [row.request_id for row in plan.rows]
        answered = [row.request_id for row in result.rows]
        if result.step != plan.step or answered != planned:
            raise EngineError(
                f"step {plan.step} of requests {planned} was answered by step {result.step} "
                f"of requests {answered}"
            )
        events: Events = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            sequence = self._running[row.request_id]
            sequence.count(row_result, result.stats, len(plan.rows))
            event = self._take_row(sequence, row, row_result, now)
            if event is not None:
                events.append((row.request_id, event))
        return events

    def fail(self, error: FmoeError) -> Events:
        """Ends everything, running and waiting, with `error`: no later step can succeed."""
        self._in_flight = None
        return [(s.request_id, self._end(s, "error", error)) for s in list(self._sequences())]

    def _check_prompt(self, prompt: list[int]) -> None:
        longest = self._info.max_context - 1
        if not prompt:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        if len(prompt) > longest:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; with the context of "
                f"{self._info.max_context} tokens it may have at most {longest}",
                "prompt",
                "context_length_exceeded",
            )
        outside = next((t for t in prompt if not 0 <= t < self._info.vocab_size), None)
        if outside is not None:
            raise InvalidRequestError(
                f"token {outside} is outside the vocabulary of {self._info.vocab_size}", "prompt"
            )

    def _plan_rows(self, now: float) -> Iterator[Row]:
        budget = self._info.max_prefill_tokens
        for sequence in self._running.values():
            row = sequence.next_row(self._info.max_prefill_tokens)
            if sequence.next_token is None:  # only the rest of one long prompt: it comes first
                budget -= len(row.tokens)
            yield row
        while self._waiting and self._free_slots and budget > 0:
            length = len(self._waiting[0].request.prompt)
            if min(length, self._info.max_prefill_tokens) > budget:
                return  # the next step has room for it; nobody overtakes
            sequence = self._waiting.popleft()
            sequence.slot = heapq.heappop(self._free_slots)
            sequence.started_s = now
            self._running[sequence.request_id] = sequence
            row = sequence.next_row(self._info.max_prefill_tokens)
            budget -= len(row.tokens)
            yield row

    def _take_row(
        self, sequence: Sequence, row: Row, result: RowResult, now: float
    ) -> Event | None:
        sequence.num_computed += len(row.tokens)
        if sequence.is_cancelled:
            return self._end(sequence, "cancelled")
        if result.error is not None:
            return self._end(sequence, "error", EngineError(result.error))
        if not row.samples:
            return None
        reason = sequence.accept(result, self._tokenizer.eos_token_ids, self._info.max_context, now)
        return self._end(sequence, reason) if reason else sequence.take_event()

    def _fail_rows(self, rows: list[Row], error: EngineError) -> Events:
        ended = [self._running[row.request_id] for row in rows]
        return [(s.request_id, self._end(s, "error", error)) for s in ended]

    def _end_early(self, request_id: int, reason: FinishReason, error: FmoeError | None) -> Events:
        sequence = next((s for s in self._sequences() if s.request_id == request_id), None)
        if sequence is None:
            return []
        if self._in_flight is not None and request_id in self._running:
            sequence.is_cancelled = True
            return []
        return [(request_id, self._end(sequence, reason, error))]

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: FmoeError | None = None
    ) -> Event:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            del self._running[sequence.request_id]
            heapq.heappush(self._free_slots, sequence.slot)
            self._ended.append(sequence.request_id)
        return sequence.end(reason, error)

    def _sequences(self) -> Iterator[Sequence]:
        yield from self._running.values()
        yield from self._waiting

    def check_integrity(self) -> None:
        """Every slot is free or held by one running request; nobody waits with a slot."""
        held = [sequence.slot for sequence in self._running.values() if sequence.slot is not None]
        assert len(held) == len(self._running)
        assert sorted([*held, *self._free_slots]) == list(range(self._info.num_slots)), held
        assert all(s.slot is None and s.num_computed == 0 for s in self._waiting)
        assert all(s.num_computed <= self._info.max_context for s in self._running.values())
        assert len(self._waiting) <= self._max_waiting + self._info.num_slots
        for row in self._in_flight.rows if self._in_flight else ():
            assert self._running[row.request_id].slot == row.slot, row
