"""MXFP4 by the letter, and checkpoints in it.

Shape letters as in fmoe_ray/models/mxfp4.py: J experts, R rows, I inputs of a row.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fmoe_ray.evaluate.tiny_models import tiny_model

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def value(code: int, scale: int) -> float:
    return (-1.0 if code >= 8 else 1.0) * MAGNITUDES[code % 8] * 2.0 ** (scale - 127)


def quantise(weight_JRI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [J, R, I / 32, 16] and scales uint8 [J, R, I / 32]; to the nearest code."""
    groups = weight_JRI.float().reshape(*weight_JRI.shape[:-1], -1, 32)
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    exponents = (largest / 6).log2().ceil()
    scaled = groups / exponents.exp2()
    codes = (scaled.abs()[..., None] - torch.tensor(MAGNITUDES)).abs().argmin(dim=-1)
    codes += 8 * (scaled < 0)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)


def save_mxfp4(family: str, folder: Path, *, num_files: int = 1, **overrides: Any) -> Path:
    """A checkpoint as gpt-oss's is published: the weights of experts in MXFP4, all else in
    bfloat16, and a config.json that names no type.
    """
    model = tiny_model(family, torch.bfloat16, **overrides)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        module, _, parameter = name.rpartition(".")
        if not module.endswith(".experts") or parameter.endswith("bias"):
            tensors[name] = tensor.contiguous()
            continue
        rows = tensor.mT if model.get_submodule(module).is_transposed else tensor
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantise(rows)
    names = list(tensors)
    files = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(names)}
    model.config.save_pretrained(folder)
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = folder / "config.json"
    document = json.loads(config.read_text())
    del document["dtype"]
    document["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    config.write_text(json.dumps(document))
    return folder
