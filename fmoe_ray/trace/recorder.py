"""Collects what inference shows of its routing and writes it as one trace. Knows no engine.

Shapes: n tokens of a row, L MoE layers, J experts per layer, K chosen, h embedding size.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fmoe_ray.errors import TraceError
from fmoe_ray.trace.format import DECODE, PREFILL, RoutingTrace, save_trace

Array = npt.NDArray[Any]
logger = logging.getLogger(__name__)

_OPTIONAL = ("token_ids", "probs", "spec_probs", "embeddings")


@dataclass(slots=True)
class _Request:
    arrival_s: float
    parts: dict[str, list[Array]] = field(default_factory=dict)
    num_tokens: int = 0


class TraceRecorder:
    """One owner; not thread-safe. Every row is copied, so callers may reuse their buffers.

    Either every row has an optional part or none has it. Memory grows with what was recorded, so
    recording stops for good, with a logged warning, at the first row that would exceed
    `max_bytes`; writing takes as much again for a while. Nothing is on disk before `write`, which
    is called as often as wanted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_experts: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._num_experts = num_experts
        self._max_bytes = max_bytes
        self._clock = clock
        self._began_s = clock()
        self._requests: dict[int, _Request] = {}
        self._num_tokens = 0
        self._num_bytes = 0
        self._is_full = False
        self._optional: frozenset[str] | None = None

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def record(
        self,
        request_id: int,
        *,
        is_prefill: bool,
        expert_ids: Array,
        weights: Array,
        token_ids: Array | None = None,
        probs: Array | None = None,
        spec_probs: Array | None = None,
        embeddings: Array | None = None,
    ) -> None:
        """One row of one iteration, n = 1 in decode.

        expert_ids int [n, L, K]; weights float [n, L, K]; token_ids int [n]; probs and spec_probs
        float [n, L, J]; embeddings float [n, h]. Ids of requests are never reused. Raises
        TraceError for a row that does not fit the rows before.
        """
        given = {
            "token_ids": token_ids,
            "probs": probs,
            "spec_probs": spec_probs,
            "embeddings": embeddings,
        }
        self._check(expert_ids, weights, given)
        num_tokens = len(expert_ids)
        phase = np.full(num_tokens, PREFILL if is_prefill else DECODE, np.uint8)
        id_dtype = np.uint8 if self._num_experts <= 256 else np.uint16
        row = {
            "expert_ids": expert_ids.astype(id_dtype),
            "weights": weights.astype(np.float16),
            "phase": phase,
        }
        for name, part in given.items():
            if part is not None:
                row[name] = part.astype(np.int32 if name == "token_ids" else np.float16)
        num_bytes = sum(part.nbytes for part in row.values())
        if self._is_full or self._num_bytes + num_bytes > self._max_bytes:
            self._stop()
            return
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(self._clock() - self._began_s)
        for name, part in row.items():
            request.parts.setdefault(name, []).append(part)
        request.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self._num_bytes += num_bytes

    def write(self) -> None:
        """Replaces the file by everything recorded so far; writes none where that is nothing.

        Raises TraceError if it cannot be written.
        """
        if not self._requests:
            return
        requests = list(self._requests.values())
        names = requests[0].parts
        arrays: dict[str, Any] = {
            name: np.concatenate([part for request in requests for part in request.parts[name]])
            for name in names
        }
        lengths = np.array([request.num_tokens for request in requests], np.int64)
        trace = RoutingTrace(
            **arrays,
            seq_start=np.cumsum(lengths) - lengths,
            seq_len=lengths,
            num_experts=self._num_experts,
            arrival_s=np.array([request.arrival_s for request in requests]),
        )
        save_trace(self._path, trace)

    def _check(self, expert_ids: Array, weights: Array, given: dict[str, Array | None]) -> None:
        if expert_ids.ndim != 3 or len(expert_ids) == 0 or weights.shape != expert_ids.shape:
            raise TraceError(
                f"recorded row has expert_ids {list(expert_ids.shape)} and weights "
                f"{list(weights.shape)}; both are [n, L, K], n at least 1"
            )
        present = frozenset(name for name, part in given.items() if part is not None)
        if self._optional is None:
            self._optional = present
        if present != self._optional:
            raise TraceError(
                f"recorded row has {sorted(present)}; the rows before it {sorted(self._optional)}"
            )

    def _stop(self) -> None:
        if not self._is_full:
            logger.warning(
                "%s: recording stops for good at %d tokens in %d bytes, the limit is %d "
                "(offload.record_bytes)",
                self._path,
                self._num_tokens,
                self._num_bytes,
                self._max_bytes,
            )
        self._is_full = True
