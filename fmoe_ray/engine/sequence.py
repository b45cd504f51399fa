"""One request inside the scheduler: where its prompt and answer stand."""

from dataclasses import dataclass, field

from fmoe_ray.engine.detokenizer import Detokenizer, StopStrings
from fmoe_ray.engine.messages import Row, RowResult, StepStats
from fmoe_ray.engine.request import Event, FinishReason, GenerationRequest, TokenChoice, Usage
from fmoe_ray.errors import FmoeError


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """`num_computed` tokens lie in the KV slot; `next_token` was drawn and comes next."""

    request_id: int
    request: GenerationRequest
    detokenizer: Detokenizer
    stops: StopStrings
    submitted_s: float
    deadline_s: float
    slot: int | None = None
    num_computed: int = 0
    next_token: int | None = None
    is_cancelled: bool = False
    num_generated: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    hits: int = 0
    late: int = 0
    misses: int = 0
    num_bytes: float = 0.0
    stall_s: float = 0.0
    event: Event = field(default_factory=Event)

    def next_row(self, max_tokens: int) -> Row:
        """The next `max_tokens` prompt tokens at most, or the token drawn last."""
        assert self.slot is not None, self.request_id
        prompt = self.request.prompt
        if self.next_token is None:
            tokens = prompt[self.num_computed : self.num_computed + max_tokens]
        else:
            tokens = [self.next_token]
        return Row(
            request_id=self.request_id,
            slot=self.slot,
            start=self.num_computed,
            tokens=tokens,
            samples=self.num_computed + len(tokens) >= len(prompt),
            sampling=self.request.sampling if self.num_computed == 0 else None,
        )

    def count(self, result: RowResult, stats: StepStats, num_rows: int) -> None:
        self.hits += result.experts.hits
        self.late += result.experts.late
        self.misses += result.experts.misses
        self.num_bytes += (stats.bytes_on_demand + stats.bytes_prefetched) / num_rows
        self.stall_s += stats.stall_seconds

    def accept(
        self, result: RowResult, eos_token_ids: frozenset[int], max_context: int, now: float
    ) -> FinishReason | None:
        """Takes a drawn token in; returns why the answer ends with it, if it does."""
        assert result.token is not None, result
        token = result.token
        self.next_token = token
        self.num_generated += 1
        self.last_token_s = now
        if self.first_token_s is None:
            self.first_token_s = now
        self.event.token_ids.append(token)
        if result.logprob is not None:
            choice = TokenChoice(token=token, logprob=result.logprob, top=result.top_logprobs)
            self.event.choices.append(choice)
        if token in eos_token_ids and not self.request.ignore_eos:
            self._show_held_text()
            return "stop"
        text, stopped = self.stops.push(self.detokenizer.push(token))
        self.event.text += text
        if stopped:
            return "stop"
        num_tokens = len(self.request.prompt) + self.num_generated
        if self.num_generated == self.request.max_tokens or num_tokens >= max_context:
            return "stop" if self._show_held_text() else "length"
        return None

    def _show_held_text(self) -> bool:
        """The answer ends: whether a stop string completes with what the detokenizer held back."""
        text, stopped = self.stops.push(self.detokenizer.flush())
        self.event.text += text if stopped else text + self.stops.flush()
        return stopped

    def take_event(self) -> Event:
        event, self.event = self.event, Event()
        return event

    def end(self, reason: FinishReason, error: FmoeError | None = None) -> Event:
        event = self.take_event()
        event.finish_reason, event.error, event.usage = reason, error, self.usage()
        return event

    def usage(self) -> Usage:
        first, started = self.first_token_s, self.started_s
        intervals = self.num_generated - 1
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.num_generated,
            hits=self.hits,
            late=self.late,
            misses=self.misses,
            num_bytes=round(self.num_bytes),
            stall_s=self.stall_s,
            queue_s=0.0 if started is None else started - self.submitted_s,
            ttft_s=0.0 if first is None else first - self.submitted_s,
            tpot_s=0.0
            if first is None or intervals < 1
            else (self.last_token_s - first) / intervals,
        )
