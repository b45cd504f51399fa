"""The model without its weights: which modules are experts, what one expert looks like, and
whether the engine can run the rest. No family is named here; everything is read from the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fmoe_ray.errors import CheckpointError, UnsupportedModelError
from fmoe_ray.models.experts import IMPLEMENTATION
from fmoe_ray.models.layout import BlobLayout

RUNNABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})
"""Layer types whose whole state, if any, is one key and one value per token."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model on the meta device. L = num_layers counts MoE layers only; J = num_experts."""

    model: Any
    config: Any
    experts: dict[str, nn.Module]
    """Module name to experts module, in the order of computation."""
    layout: BlobLayout
    num_experts: int

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def expert_parameters(self) -> dict[str, tuple[int, str]]:
        """Full parameter name to (MoE layer, name within the expert)."""
        return {
            f"{module}.{field.name}": (layer, field.name)
            for layer, module in enumerate(self.experts)
            for field in self.layout.fields
        }


def build_architecture(folder: Path, dtype: torch.dtype | None) -> Architecture:
    """Builds the model on the meta device; `dtype` None keeps the checkpoint's.

    Raises CheckpointError if transformers refuses the configuration, UnsupportedModelError if
    there is nothing to offload or a layer that the engine cannot run.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{folder}: transformers refuses config.json: {error}") from error
    return architecture_of(config, dtype)


def architecture_of(config: Any, dtype: torch.dtype | None) -> Architecture:
    """As `build_architecture`, for a configuration at hand."""
    family = config.model_type
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise UnsupportedModelError(f"{family}: transformers has no causal language model of it")
    _refuse_layers(config.get_text_config(), family)
    config._experts_implementation = IMPLEMENTATION
    dtype = dtype or config.dtype or _unnamed_dtype(config)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    experts = {name: module for name, module in model.named_modules() if is_experts_module(module)}
    if not experts:
        raise UnsupportedModelError(
            f"{family}: its experts do not follow transformers' experts interface (or it has "
            "none), so they cannot be offloaded; docs/families.md lists the families that can"
        )
    counts = {int(module.num_experts) for module in experts.values()}
    layouts = {layout_of(module) for module in experts.values()}
    if len(counts) != 1 or len(layouts) != 1:
        raise UnsupportedModelError(
            f"{family}: layers differ in the number ({sorted(counts)}) or shape of their experts; "
            "only one size of expert is supported"
        )
    return Architecture(
        model=model,
        config=config,
        experts=experts,
        layout=layouts.pop(),
        num_experts=counts.pop(),
    )


def _unnamed_dtype(config: Any) -> torch.dtype:
    """Quantised checkpoints often name no type, but bfloat16 is what their dense weights are in,
    and float32 would double the experts' bytes and add nothing to what they say.
    """
    sections = (config, config.get_text_config())
    is_quantised = any(getattr(section, "quantization_config", None) for section in sections)
    return torch.bfloat16 if is_quantised else torch.float32


def is_experts_module(module: nn.Module) -> bool:
    """Marked by transformers' decorator `use_experts_implementation`."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")


def layout_of(module: nn.Module) -> BlobLayout:
    """Every parameter of an experts module has the expert as its first dimension."""
    return BlobLayout.of(
        {
            name: (parameter.dtype, tuple(parameter.shape[1:]))
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1 and parameter.shape[0] == module.num_experts
        }
    )


def _refuse_layers(config: Any, family: str) -> None:
    types: set[str] = set()
    for name in ("layer_types", "layers_block_type"):
        types |= set(getattr(config, name, None) or [])
    foreign = sorted(types - RUNNABLE_LAYERS)
    if foreign:
        raise UnsupportedModelError(
            f"{family}: layers of type {', '.join(foreign)} keep a state that the batched KV cache "
            "cannot hold; only full and sliding-window attention is supported"
        )
