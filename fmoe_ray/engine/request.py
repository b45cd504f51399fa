"""What a caller asks of the engine, and what it gets back piece by piece."""

from dataclasses import dataclass, field
from typing import Literal

from fmoe_ray.engine.messages import Sampling, TokenLogprob
from fmoe_ray.errors import FmoeError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A tokenized prompt and how to continue it."""

    prompt: list[int]
    max_tokens: int | None = None
    """None continues until the context is full."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    ignore_eos: bool = False
    """Goes on after the model's own end, for measurements of a given length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one request cost. Times in seconds."""

    prompt_tokens: int
    completion_tokens: int
    hits: int
    late: int
    misses: int
    num_bytes: int
    """Expert bytes moved in this request's steps, divided evenly among the rows of each step."""
    stall_s: float
    """Time that its steps waited for experts."""
    queue_s: float
    """From submission to its first step."""
    ttft_s: float
    """From submission to its first token; 0 if there was none."""
    tpot_s: float
    """Mean time between its tokens after the first; 0 below two tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChoice:
    """The log-probability of a chosen token, and of the best alternatives."""

    token: int
    logprob: float
    top: list[TokenLogprob]


@dataclass(kw_only=True, slots=True)
class Event:
    """What a request has generated since its last event. The last carries finish_reason and usage.

    Concatenated texts are the answer; concatenated token ids are all tokens the model chose, the
    end-of-sequence token and the tokens of a stop string included.
    """

    index: int = 0
    """Which of the requests submitted together."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    choices: list[TokenChoice] = field(default_factory=list)
    """Empty unless log-probabilities were asked for."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: FmoeError | None = None
    """Set with finish_reason `error`."""

    def absorb(self, later: "Event") -> None:
        """Takes over what `later` says, so that a slow reader finds one event, not many."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.choices += later.choices
        self.finish_reason = later.finish_reason
        self.usage = later.usage
        self.error = later.error
