"""Models of real sizes with random weights, made in place: no checkpoint is read or written."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoConfig

from fmoe_ray.cache import HostStore
from fmoe_ray.errors import ConfigError
from fmoe_ray.models.architecture import Architecture, architecture_of
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.models.router import probe_gates
from fmoe_ray.models.weights import initialise_dense

_COMMON: dict[str, Any] = {"max_position_embeddings": 4096, "use_cache": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": (
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen1.5-moe": (
        "qwen2_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
        },
    ),
    "phi-3.5-moe": (
        "phimoe",
        {
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
}
_SPREAD = 0.02
_PATTERN = 1 << 20
"""Random numbers drawn; blobs are stretches of them that begin at different places."""


def make_model(
    shape: str, device: torch.device, dtype: torch.dtype, *, overrides: dict[str, Any] | None = None
) -> LoadedModel:
    """Experts random in a nameless host store, dense weights random on the device.

    Raises ConfigError for an unknown shape, CapacityError if the experts do not fit into RAM.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; one of {', '.join(SHAPES)}")
    family, sizes = SHAPES[shape]
    config = AutoConfig.for_model(family, **{**_COMMON, **sizes, **(overrides or {})})
    architecture = architecture_of(config, dtype)
    torch.manual_seed(0)
    initialise_dense(architecture, device, dtype)
    gates = probe_gates(architecture.model, architecture.experts, architecture.num_experts)
    count = architecture.num_layers * architecture.num_experts
    store = HostStore.create("", shape, count, architecture.layout.blob_bytes)
    _fill(store, architecture, dtype)
    store.seal()
    return LoadedModel(
        model=architecture.model,
        experts=architecture.experts,
        layout=architecture.layout,
        num_experts=architecture.num_experts,
        gates=gates,
        store=store,
        fingerprint=shape,
        device=device,
        dtype=dtype,
    )


def _fill(store: HostStore, architecture: Architecture, dtype: torch.dtype) -> None:
    size = architecture.layout.blob_bytes // dtype.itemsize
    length = max(_PATTERN, size)
    pattern = (torch.randn(length, dtype=torch.float32) * _SPREAD).to(dtype).repeat(2)

    def write(index: int) -> None:
        begin = index * 8191 % length
        blob = torch.from_numpy(store.blob(index)).view(dtype)
        blob.copy_(pattern[begin : begin + size])

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(write, range(store.num_blobs)):
            pass
