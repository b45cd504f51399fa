"""Tiny random models of many families, to check that each loads and runs: the sizes are set here,
everything else is the family's own default.
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HIDDEN, INNER, LAYERS, EXPERTS, TOP_K, VOCAB = 64, 32, 3, 8, 2, 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "ffn_hidden_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "moe_shared_expert_intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_k": TOP_K,
    "moe_topk": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 1,
    "enable_moe_block": True,
    "router_jitter_noise": 0.01,
    "sliding_window": 64,
    "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "initializer_range": 0.2,
    "routed_scaling_factor": 1.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 16,
    "use_mamba_kernels": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
}
_LINEAR = ["linear_attention", "full_attention", "full_attention"]
_KNOBS: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "group_limited_greedy"},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"sliding_window": None, "mlp_only_layers": [0]},
    "qwen3_moe": {"sliding_window": None, "norm_topk_prob": True},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "minimax": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": ["full_attention", "mamba", "full_attention"],
        "shared_intermediate_size": INNER,
        "mamba_expand": 2,
    },
    **{
        name: {"num_key_value_heads": 4}
        for name in ("deepseek_v3", "axk1", "axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
    },
    **{
        name: {"num_key_value_heads": 4, "head_dim": 8, "layer_types": _LINEAR}
        for name in ("bailing_hybrid", "kimi_linear")
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "longcat_flash": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "expert_ffn_hidden_size": INNER,
        "zero_expert_num": 2,
        "num_layers": LAYERS,
    },
    "zaya": {"num_experts_per_tok": 1},
    "jamba": {"sliding_window": None},
    "dbrx": {
        "d_model": HIDDEN,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 512,
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    },
}


def tiny_config(family: str, **overrides: Any) -> Any:
    config_class = CONFIG_MAPPING[family]
    names = set(inspect.signature(config_class.__init__).parameters)
    if dataclasses.is_dataclass(config_class):
        names |= {field.name for field in dataclasses.fields(config_class)}
    aliases = getattr(config_class, "attribute_map", None) or {}
    sizes = {k: v for k, v in _SIZES.items() if k in names and aliases.get(k) not in names}
    return config_class(**{**sizes, **_KNOBS.get(family, {}), **overrides})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Random weights; biases, which decide the choice in many families, are not left at zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = [*model.named_buffers(), *model.named_parameters()]
    with torch.no_grad():
        for name, tensor in tensors:
            if "bias" in name and tensor.dim() <= 2 and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def save_tiny(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A checkpoint as the hub has it: several shards, one tensor per expert."""
    tiny_model(family, dtype, **overrides).save_pretrained(folder, max_shard_size="300KB")
    return folder
