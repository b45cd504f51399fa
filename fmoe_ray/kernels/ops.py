"""The kernels as torch operators, so that a compiled or captured model can call them.

Graphs hold tensors and numbers only: what an operator needs beside them (KV storage, slots, the
handshake) it finds in the `StepState` that `bind` has made current in this process.
"""

from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


class StepState(Protocol):
    """What the model's layers reach through operators during one step."""

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        scores: Tensor,
        router_input: Tensor,
        layer: int,
    ) -> Tensor:
        """x [T, H], ids and weights [T, K], scores (the router's output) [T, J] or empty, what the
        router read or empty -> weighted [T, K, H].
        """


class DecodeState(StepState, Protocol):
    """As `StepState`, where each row has one token."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [B, Q, D], k [B, G, D], v [B, G, V], one token a row -> [B, Q, V]."""


_current: list[StepState] = []
_is_decoding = False  # not of a thread: compiled layers read it, and could not
_thread = 0


@contextmanager
def bind(state: StepState, *, decodes: bool = False) -> "Iterator[None]":
    """Operators called inside reach `state`; `decodes`: it is a `DecodeState`. One thread of a
    process at a time.
    """
    global _is_decoding, _thread
    assert not _current or _thread == get_ident(), "another thread of this process is in a step"
    _thread = get_ident()
    before = _is_decoding
    _current.append(state)
    _is_decoding = decodes
    try:
        yield
    finally:
        _is_decoding = before
        _current.pop()


def is_decoding() -> bool:
    return _is_decoding


def current() -> StepState:
    assert _current, "a model operator runs outside of bind()"
    assert _thread == get_ident(), "a model operator runs in a step of another thread"
    return _current[-1]


@torch.library.custom_op("fmoe::linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """`kernels.linear.linears`; x [..., K] -> [..., sum N]."""
    if x.is_cuda:
        from fmoe_ray.kernels import linear

        out = linear.linears(x.reshape(-1, x.shape[-1]), weights, biases)
        return out.view(*x.shape[:-1], out.shape[-1])
    nothing: list[Tensor | None] = [None] * len(weights)
    pairs = zip(weights, biases or nothing, strict=True)
    return torch.cat([F.linear(x, w, b) for w, b in pairs], dim=-1)


@linears.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights))


@torch.library.custom_op("fmoe::topk", mutates_args=())
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`kernels.routing.topk`; scores [..., J]."""
    if scores.is_cuda:
        from fmoe_ray.kernels import routing

        values, indices = routing.topk(scores.reshape(-1, scores.shape[-1]), k)
        shape = (*scores.shape[:-1], k)
        return values.view(shape), indices.view(shape)
    found = torch.sort(scores, dim=-1, descending=True, stable=True)
    return found.values[..., :k].contiguous(), found.indices[..., :k].contiguous()


@topk.register_fake
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("fmoe::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    state: Any = current()  # bound with decodes=True
    output: Tensor = state.attend(q, k, v, int(layer), scale, window, softcap, sinks)
    return output


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("fmoe::experts", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, scores: Tensor, router_input: Tensor, layer: Tensor
) -> Tensor:
    return current().experts(x, ids, weights, scores, router_input, int(layer))


@experts.register_fake
def _(
    x: Tensor, ids: Tensor, weights: Tensor, scores: Tensor, router_input: Tensor, layer: Tensor
) -> Tensor:
    dtype = torch.promote_types(x.dtype, weights.dtype)
    return x.new_empty(*ids.shape, x.shape[-1], dtype=dtype)
