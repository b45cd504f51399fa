"""Attention over a packed step: each row attends to its own slot, one row after the other.

A row's result does not depend on the other rows of the step, not even in the last bit.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from fmoe_ray.engine.kv_cache import KVCache, Span
from fmoe_ray.kernels import ops

IMPLEMENTATION = "fmoe_ragged"
_SPECIAL = ("s_aux", "softcap", "position_bias")
"""What SDPA cannot do: attention sinks, capped scores, biases. The family's own function can."""


def bind_attention(model: Any, cache: KVCache) -> None:
    """From now on the model attends through `cache`, and builds no attention mask."""
    model.set_attn_implementation(IMPLEMENTATION)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module._fmoe_cache = cache
            module._fmoe_kv_layer = torch.tensor(module.layer_idx)
            module._fmoe_window = _window(module) if hasattr(module, "config") else None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, D] for `query` [1, heads, T, D]; transformers' attention interface."""
    window: int | None = module._fmoe_window if sliding_window is None else sliding_window
    # A runner on the CPU has no decode steps; one on the GPU may be in one, on another thread.
    if query.is_cuda and ops.is_decoding():
        return _attend_once(module, query, key, value, scaling, window, **kwargs), None
    cache: KVCache = module._fmoe_cache
    special = hasattr(module, "sinks") or any(kwargs.get(name) is not None for name in _SPECIAL)
    outputs = []
    for span, (keys, values) in zip(cache.spans, cache.histories(key, value), strict=True):
        queries = query[:, :, span.begin : span.begin + span.num_tokens]
        if special:
            mask = _additive(cache.mask(span, window, query.device), span, query)
            own = sys.modules[type(module).__module__].eager_attention_forward
            output, _ = own(
                module,
                queries,
                keys,
                values,
                mask,
                scaling=scaling,
                dropout=0.0,
                sliding_window=window,
                **kwargs,
            )
        else:
            is_causal = span.is_fresh and (window is None or window >= span.length)
            output = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=None if is_causal else cache.mask(span, window, query.device),
                is_causal=is_causal,
                scale=scaling,
                enable_gqa=query.shape[1] != keys.shape[1],
            ).transpose(1, 2)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def _attend_once(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: None = None,
    **_: Any,
) -> torch.Tensor:
    """A step of one token a row, by an operator that also stores keys and values. Compilable."""
    assert position_bias is None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module._fmoe_kv_layer
    output: torch.Tensor = torch.ops.fmoe.attend(
        q, k, v, layer, scale, window or 0, softcap or 0.0, s_aux
    )
    return output[None]


def _window(module: nn.Module) -> int | None:
    """For families that put the window into the mask alone, which our attention does not see."""
    config: Any = module.config
    window: int | None = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_types[module.layer_idx] == "sliding_attention":
        return window
    return None


def _additive(seen: torch.Tensor | None, span: Span, like: torch.Tensor) -> torch.Tensor:
    mask = like.new_zeros(1, 1, span.num_tokens, span.length)
    return mask if seen is None else mask.masked_fill_(~seen, torch.finfo(like.dtype).min)
