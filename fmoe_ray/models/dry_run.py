"""What a forward pass would ask for, found out on the meta device: no weights, no memory.

Shape letters: T tokens, K experts of a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from fmoe_ray.errors import UnsupportedModelError
from fmoe_ray.models.architecture import Architecture
from fmoe_ray.models.experts import bind_experts

_IMPLEMENTATION = "fmoe_dry"
_NUM_TOKENS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    top_k: int
    """Experts of a token in one layer."""
    kv_bytes_per_token: int
    """Keys and values of all layers, as the family caches them."""


def dry_run(architecture: Architecture) -> Demands:
    """Runs the architecture's model once, which must be on the meta device. Binds attention and
    experts, so the model is of no other use afterwards.

    Raises UnsupportedModelError if it cannot run with the engine's cache.
    """
    model: Any = architecture.model
    experts, cache = _Experts(), _Cache()
    bind_experts(architecture.experts.values(), experts)
    model.set_attn_implementation(_IMPLEMENTATION)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, cache=cache, use_cache=True)
    except (AttributeError, TypeError) as error:  # a cache of its own kind
        raise UnsupportedModelError(
            f"{architecture.config.model_type}: cannot run with batched KV slots "
            f"({type(error).__name__}: {error}); docs/families.md lists what can"
        ) from error
    return Demands(top_k=experts.top_k, kv_bytes_per_token=cache.num_bytes // _NUM_TOKENS)


class _Experts:
    top_k = 0

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        self.top_k = max(self.top_k, index_TK.shape[1])
        return torch.zeros_like(hidden_TH)


class _Cache:
    """As `engine.kv_cache.KVCache` is handed to a model; only counts."""

    is_compileable = False  # transformers asks
    num_bytes = 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_bytes += key.nbytes + value.nbytes
        return key, value

    def get_seq_length(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: object) -> tuple[int, int]:
        return query_length, 0


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, D of `value`], and no mask is built for it."""
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return value.new_empty(shape), None


AttentionInterface.register(_IMPLEMENTATION, _attend)
