"""A runner without a model: pseudo tokens at a set rate. For tests and streaming benchmarks."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Progress
from fmoe_ray.engine.messages import (
    ExpertCounts,
    Row,
    RowResult,
    Sampling,
    StepPlan,
    StepResult,
    StepStats,
    TokenLogprob,
)
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.engine.seat import ONLY_SEAT, Seat
from fmoe_ray.engine.tokenizer import ChatMessage

EOS = 256
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_STUB_TOP_K = 2


class StubTokenizer:
    """A token is a byte; 256 ends the text."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < EOS).decode(errors="replace")


@dataclass(slots=True)
class _Request:
    slot: int
    sampling: Sampling
    num_tokens: int = 0


class StubRunner:
    """Greedy answers continue the alphabet after the prompt's last letter and end after `z`.

    Anything but a letter is followed by `a`. With a temperature the letters are drawn from seed and
    position and never end. An answer is a function of its request, never of the batch. Every plan
    is checked against the rules of KV slots.
    """

    def __init__(
        self,
        *,
        num_slots: int = 16,
        max_context: int = 4096,
        max_prefill_tokens: int = 1024,
        step_s: float = 0.0,
    ) -> None:
        self._step_s = step_s
        self._requests: dict[int, _Request] = {}
        self._info = RunnerInfo(
            num_slots=num_slots,
            max_context=max_context,
            max_prefill_tokens=max_prefill_tokens,
            vocab_size=EOS + 1,
            num_layers=2,
            num_experts=8,
            top_k=_STUB_TOP_K,
            expert_bytes=1024,
            expert_slots=4,
            device="cpu",
            dtype="float32",
            policy="stub",
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def learned_maps(self) -> None:
        return None

    async def step(self, plan: StepPlan) -> StepResult:
        await asyncio.sleep(self._step_s)
        for request_id in plan.ended:
            del self._requests[request_id]
        rows = [self._compute(row) for row in plan.rows]
        misses = sum(row.experts.misses for row in rows)
        stats = StepStats(
            seconds=self._step_s,
            stall_seconds=0.0,
            bytes_on_demand=misses * self._info.expert_bytes,
            bytes_prefetched=0,
            hits=sum(row.experts.hits for row in rows),
            late=0,
            misses=misses,
        )
        self.check_integrity()
        return StepResult(step=plan.step, rows=rows, stats=stats)

    async def close(self) -> None:
        self._requests.clear()

    def check_integrity(self) -> None:
        slots = [request.slot for request in self._requests.values()]
        assert len(set(slots)) == len(slots), f"a slot is shared: {self._requests}"
        assert all(0 <= slot < self._info.num_slots for slot in slots), slots

    def _compute(self, row: Row) -> RowResult:
        if row.sampling is not None:
            assert row.request_id not in self._requests, f"{row} begins twice"
            self._requests[row.request_id] = _Request(row.slot, row.sampling)
        request = self._requests[row.request_id]
        assert (request.slot, request.num_tokens) == (row.slot, row.start), (request, row)
        request.num_tokens += len(row.tokens)
        assert request.num_tokens <= self._info.max_context, row
        experts = ExpertCounts(hits=len(row.tokens) * (_STUB_TOP_K - 1), misses=len(row.tokens))
        if not row.samples:
            return RowResult(request_id=row.request_id, token=None, experts=experts)
        token = self._next_token(row.tokens[-1], request)
        num_logprobs = request.sampling.num_logprobs
        top = [
            TokenLogprob(token=(token + i) % EOS, logprob=-0.1 - i)
            for i in range(num_logprobs or 0)
        ]
        return RowResult(
            request_id=row.request_id,
            token=token,
            experts=experts,
            logprob=None if num_logprobs is None else -0.1,
            top_logprobs=top,
        )

    def _next_token(self, last: int, request: _Request) -> int:
        if request.sampling.temperature > 0:
            return random.Random(f"{request.sampling.seed} {request.num_tokens}").choice(_LETTERS)
        if not _LETTERS[0] <= last <= _LETTERS[-1]:
            return _LETTERS[0]
        return EOS if last == _LETTERS[-1] else last + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StubBackend:
    """A backend without a model, for tests of everything around it and streaming benchmarks."""

    num_slots: int = 16
    step_s: float = 0.0

    def check(self, settings: Settings) -> None:
        """A stub runs anywhere."""

    def load_tokenizer(self, settings: Settings) -> StubTokenizer:
        return StubTokenizer()

    def load_runner(
        self, settings: Settings, progress: Progress | None = None, seat: Seat = ONLY_SEAT
    ) -> StubRunner:
        return StubRunner(num_slots=self.num_slots, step_s=self.step_s)
