"""What scheduler and step runner say to each other, one message per step each way.

The scheduler decides who computes what; the runner holds model, KV slots, random state and experts.
Encoded with `msgspec.msgpack` where the two live in different processes.
"""

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's next token is drawn. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int | None = None
    num_logprobs: int | None = None
    """Alternatives to report per token; None reports nothing."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part of a step: `tokens` go to positions start.. of its KV slot."""

    request_id: int
    slot: int
    start: int
    tokens: list[int]
    samples: bool
    """False for a prompt chunk that is not the last."""
    sampling: Sampling | None = None
    """Sent with the first row of a request; the runner keeps it with the random state."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    rows: list[Row]
    ended: list[int] = []
    """Requests that ended since the last plan: the runner forgets their random state and maps."""


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A row's experts in one step. hit: ready when asked; late: in flight; miss: not requested."""

    hits: int = 0
    late: int = 0
    misses: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    logprob: float


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    request_id: int
    token: int | None
    """None where the row did not sample, and on all shards but the first."""
    experts: ExpertCounts
    logprob: float | None = None
    top_logprobs: list[TokenLogprob] = []
    error: str | None = None
    """This row alone failed (not a number in its logits, for example); the others stand."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step, all rows together; what moves between two steps counts for the second."""

    seconds: float
    stall_seconds: float
    bytes_on_demand: int
    bytes_prefetched: int
    hits: int
    late: int
    misses: int
    bytes_prefetch_used: int = 0
    """Prefetched at some time, and asked for by a gate of this step."""
    bytes_prefetch_wasted: int = 0
    """Evicted or cancelled in this step before any gate asked."""
    num_predictions: int = 0
    """One a row and layer."""
    prediction_score: float = 0.0
    """Sum over them: how similar was what they were made from."""
    num_maps: int = 0
    """Expert maps that the predictor keeps."""
    resident: bytes = b""
    """Experts in the slots after the step, a bit each, the first in the highest bit; of the first
    rank alone, and only twice a second."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    rows: list[RowResult]
    stats: StepStats
    error: str | None = None
    """The whole step failed: every request in it ends with this message."""
    routing_checksum: int = 0
    """Of what the gates chose; shards of a replica that differ in it have computed nonsense."""
