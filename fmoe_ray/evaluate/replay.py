"""Routing that a benchmark imposes on a model of random weights: drawn evenly, or recorded.

Recorded sequences are shared out: some teach the policy as earlier requests would have, the others
are the rows that are timed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fmoe_ray.errors import ConfigError
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.trace.format import RoutingTrace, load_trace

SEEN_SEQUENCES = 24
MAX_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """By row and position in it."""

    experts: Callable[[int, int], np.ndarray]
    """int [L, K]: what the gates choose there."""
    token: Callable[[int, int], int] | None = None
    """The token that is there; None: what the model makes of it."""
    seen: RoutingTrace | None = None
    """Requests served before, with the model's own embeddings."""


def open_routing(name: str, loaded: LoadedModel, seed: int) -> Routing | None:
    """`model`: None; `uniform`; or a trace of the model's geometry.

    Raises ConfigError, TraceError.
    """
    if name == "model":
        return None
    return _uniform(loaded, seed) if name == "uniform" else _recorded(name, loaded, seed)


def _uniform(loaded: LoadedModel, seed: int) -> Routing:
    def draw(row: int, position: int) -> np.ndarray:
        random = np.random.default_rng((seed, row, position))
        shape = loaded.num_layers, loaded.num_experts
        return random.random(shape).argpartition(loaded.top_k, -1)[:, : loaded.top_k]

    return Routing(experts=draw)


def _recorded(name: str, loaded: LoadedModel, seed: int) -> Routing:
    trace = load_trace(Path(name))
    layers, experts, top_k = loaded.num_layers, loaded.num_experts, loaded.top_k
    if (trace.num_layers, trace.num_experts, trace.top_k) != (layers, experts, top_k):
        raise ConfigError(
            f"--routing {name}: {trace.num_layers} layers of {trace.num_experts} experts, top "
            f"{trace.top_k}; the model has {layers} of {experts}, top {top_k}"
        )
    order = np.random.default_rng(seed).permutation(trace.num_sequences)
    num_seen = min(SEEN_SEQUENCES, trace.num_sequences - 1)
    timed = order[num_seen:]
    rows: dict[int, RoutingTrace] = {}

    def of(row: int) -> RoutingTrace:
        if row not in rows:
            own = timed[row % len(timed) :: MAX_ROWS]
            rows[row] = trace.select(own)
        return rows[row]

    def chosen(row: int, position: int) -> np.ndarray:
        ids: np.ndarray = of(row).expert_ids[position % of(row).num_tokens]
        return ids

    def token(row: int, position: int) -> int:
        tokens = of(row).token_ids
        assert tokens is not None
        return int(tokens[position % len(tokens)])

    seen = trace.select(order[:num_seen])
    return Routing(
        experts=chosen,
        token=None if trace.token_ids is None else token,
        seen=seen if seen.token_ids is None else _embedded(seen, seen.token_ids, loaded),
    )


def _embedded(trace: RoutingTrace, tokens_T: np.ndarray, loaded: LoadedModel) -> RoutingTrace:
    vocabulary = loaded.model.get_input_embeddings().weight
    if tokens_T.min() < 0 or tokens_T.max() >= len(vocabulary):
        raise ConfigError(
            f"the trace has tokens {tokens_T.min()} to {tokens_T.max()}, the model knows "
            f"{len(vocabulary)}"
        )
    with torch.inference_mode():
        embeddings_TH = vocabulary[torch.from_numpy(tokens_T).long().to(vocabulary.device)]
    return replace(trace, embeddings=embeddings_TH.to("cpu", torch.float16).numpy())
