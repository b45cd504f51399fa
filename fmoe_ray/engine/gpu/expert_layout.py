"""What the kernels must know of one expert, read from the experts module itself: where its tensors
lie, how they are stored, which gate function it has. No family is named here.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fmoe_ray.kernels.experts import ExpertLayout
from fmoe_ray.models.layout import BlobLayout

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _clamp_swiglu(alpha: float, limit: float) -> Gate:
    def gate(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        g = g.clamp(max=limit)
        return (u.clamp(-limit, limit) + 1) * (g * torch.sigmoid(g * alpha))

    return gate


def _gates(module: Any) -> dict[str, Gate]:
    alpha, limit = float(getattr(module, "alpha", 0.0)), float(getattr(module, "limit", 0.0))
    return {
        "silu": lambda g, u: F.silu(g) * u,
        "gelu": lambda g, u: F.gelu(g) * u,
        "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
        "relu2": lambda g, u: F.relu(g).square() * u,
        "relu": lambda g, u: F.relu(g) * u,
        "clamp_swiglu": _clamp_swiglu(alpha, limit),
    }


def activation_of(module: Any) -> str | None:
    """Which of the kernels' gate functions computes what the module's own does; None if none."""
    generator = torch.Generator().manual_seed(0)
    g, u = torch.randn(2, 16, 64, generator=generator) * 6
    if not module.has_gate:
        own = module.act_fn(g)
        u = torch.ones_like(u)
    elif module.is_concatenated:
        own = module._apply_gate(torch.cat([g, u], -1))
    else:
        own = module._apply_gate(torch.stack([g, u], -1).flatten(-2))
    for name, gate in _gates(module).items():
        if name == "clamp_swiglu" and not module.has_gate:
            continue
        if torch.allclose(own, gate(g, u), rtol=1e-5, atol=1e-6):
            return name
    return None


def kernel_layout(blob: BlobLayout, module: Any, slot_stride_bytes: int) -> ExpertLayout | None:
    """None for an expert that the kernels cannot compute: another gate function, a norm behind it,
    parameters of several types or names.
    """
    fields = {field.name: field for field in blob.fields}
    up = "gate_up_proj" if module.has_gate else "up_proj"
    known = {up, "down_proj", f"{up}_bias", "down_proj_bias"}
    dtypes = {field.dtype for field in blob.fields}
    activation = activation_of(module)
    if (
        not {up, "down_proj"} <= set(fields) <= known
        or (f"{up}_bias" in fields) != ("down_proj_bias" in fields)
        or len(dtypes) != 1
        or activation is None
        or module.has_post_expert_norm
    ):
        return None
    size = dtypes.pop().itemsize
    hidden, inner = fields["down_proj"].shape
    if module.is_transposed:
        hidden, inner = inner, hidden

    def at(name: str) -> int:
        return fields[name].offset // size if name in fields else -1

    return ExpertLayout(
        hidden=hidden,
        inner=inner,
        gate_up=at(up),
        down=at("down_proj"),
        gate_up_bias=at(f"{up}_bias"),
        down_bias=at("down_proj_bias"),
        stride=slot_stride_bytes // size,
        is_transposed=module.is_transposed,
        is_interleaved=module.has_gate and not module.is_concatenated,
        has_gate=module.has_gate,
        activation=activation,
        alpha=float(getattr(module, "alpha", 0.0)),
        limit=float(getattr(module, "limit", 0.0)),
    )
