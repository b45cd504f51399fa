"""Which device computes and in which type."""

from typing import Literal

import torch

from fmoe_ray.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: DeviceName) -> torch.device:
    """Raises ConfigError for `cuda` where there is none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.device: cuda, but torch finds no GPU here; check the driver and that torch is a "
            "CUDA build, or set model.device: cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: DtypeName, device: torch.device) -> torch.dtype | None:
    """None keeps the checkpoint's type: `auto` on a GPU. On a CPU `auto` is float32."""
    if name != "auto":
        return _DTYPES[name]
    return torch.float32 if device.type == "cpu" else None
