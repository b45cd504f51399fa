"""A checkpoint folder on disk: where it is, whether it is whole, what it holds, its fingerprint.

Reads configuration and safetensors headers only. Knows neither the architecture nor torch.
"""

import hashlib
import json
import operator
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from fmoe_ray.errors import CheckpointError, CheckpointNotFoundError, UnsupportedModelError

TINY_FOLDER = Path(__file__).parents[1] / "assets" / "tiny-dialogue-moe"
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_DOWNLOADS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_NOT_DOWNLOADED = ["*/*.safetensors"]
"""The same weights for other software, in folders of their own."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MAX_HEADER_BYTES = 100 * 2**20
_SAMPLE_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file; `start` and `end` are bytes of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint; made by `open_checkpoint`."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in sorted({e.file for e in self.tensors.values()})]

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over configuration, tensor names, shapes and types, file sizes, and 64
        bytes from the middle of every tensor: milliseconds for a few thousand tensors, however big.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        by_file: dict[str, list[tuple[str, TensorEntry]]] = {}
        for name, entry in sorted(self.tensors.items()):
            by_file.setdefault(entry.file, []).append((name, entry))
        for file, entries in sorted(by_file.items()):
            path = self.folder / file
            digest.update(f"{path.stat().st_size}\n".encode())
            with path.open("rb") as stream:
                for name, entry in entries:
                    digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
                    stream.seek((entry.start + entry.end) // 2 - _SAMPLE_BYTES // 2)
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:32]


def is_hub_name(path: str) -> bool:
    """True for `owner/name` that is no folder here."""
    return not Path(path).expanduser().exists() and _HUB_NAME.fullmatch(path) is not None


def resolve(path: str) -> Path:
    """The folder behind `tiny`, a folder or a hub name; a hub name is downloaded, safetensors only.

    Raises CheckpointNotFoundError saying what to do.
    """
    if path == "tiny":
        if not TINY_FOLDER.is_dir():
            raise CheckpointNotFoundError(
                f"the demonstration model is missing at {TINY_FOLDER}; install the package again, "
                "or give model.path a checkpoint folder"
            )
        return TINY_FOLDER
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointNotFoundError(
            f"{path} is a file; give model.path the folder with config.json"
        )
    if not is_hub_name(path):
        raise CheckpointNotFoundError(
            f"{path!r} is neither a folder here nor a hub name; correct model.path, "
            "or use 'tiny' for the demonstration model"
        )
    return _download(path)


def _download(name: str) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_DOWNLOADS, ignore_patterns=_NOT_DOWNLOADED
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{name}: not in the local hub cache, and the hub cannot be reached; fetch it where "
            f"there is a network (`hf download {name}`) and give model.path that folder"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointNotFoundError(
            f"{name}: the hub refuses it ({error}); check the name, and `hf auth login` for a "
            "model that asks for consent"
        ) from error


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Checks that the checkpoint is whole before anything is loaded.

    Raises CheckpointNotFoundError without a folder or config.json; CheckpointError for an
    unreadable configuration, pickled weights, a missing shard or tensor, a damaged header or a
    truncated file; UnsupportedModelError for weights quantised otherwise than with MXFP4.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tensors: dict[str, TensorEntry] = {}
    for file in _safetensors_files(folder):
        for name, entry in _read_header(folder / file):
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name} is in two files; download again")
            tensors[name] = entry
    _check_index(folder, tensors)
    _refuse_quantised(folder, config, tensors)
    return Checkpoint(folder=folder, config=config, tensors=tensors)


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError if it is not a readable JSON object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download again") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds no JSON object; download again")
    return document


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointNotFoundError(f"{folder}: no config.json; is it a checkpoint folder?")
    config = read_json(path)
    if "model_type" not in config:
        raise CheckpointError(f"{path}: names no model_type; is it a transformers checkpoint?")
    return config


def _safetensors_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(_weight_map(index).values()))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights ({pickles[0]}); loading a pickle can run any code, "
            "so it is refused: convert the checkpoint to safetensors with save_pretrained"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file; download the weights")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map; download again")
    unsafe = [
        file for file in weight_map.values() if not isinstance(file, str) or Path(file).name != file
    ]
    if unsafe:
        raise CheckpointError(f"{index}: names a file outside the folder, {unsafe[0]!r}")
    return weight_map


def _check_index(folder: Path, tensors: dict[str, TensorEntry]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"{folder}: the index puts {name} into {file}, which does not hold it; "
                "download again"
            )


def _read_header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: this shard of the index is missing; download it")
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: damaged safetensors header ({header_bytes} bytes announced in a file "
                    f"of {size}); download again"
                )
            header = json.loads(stream.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: damaged safetensors header: no object; download again")
    header.pop("__metadata__", None)
    base = 8 + header_bytes
    end = base
    for name, fields in header.items():
        try:
            start, stop = fields["data_offsets"]
            entry = TensorEntry(
                file=path.name,
                dtype=fields["dtype"],
                shape=tuple(map(operator.index, fields["shape"])),
                start=base + operator.index(start),
                end=base + operator.index(stop),
            )
            if not isinstance(entry.dtype, str) or not base <= entry.start <= entry.end:
                raise ValueError(f"{entry.dtype!r} at {start} to {stop}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged safetensors header at {name}") from error
        end = max(end, entry.end)
        yield name, entry
    if size != end:
        raise CheckpointError(f"{path}: {end} bytes expected, {size} found; download again")


def _refuse_quantised(
    folder: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]
) -> None:
    for section in (config, config.get("text_config")):
        quantization = section.get("quantization_config") if isinstance(section, dict) else None
        known = quantization if isinstance(quantization, dict) else {}
        method = str(known.get("quant_method", "unknown")).upper()
        if quantization and method != "MXFP4":
            raise UnsupportedModelError(
                f"{folder}: weights quantised with {method}, which is not supported (of the "
                "quantised ones only MXFP4 is); use a bfloat16, float16 or float32 version of the "
                "model (save it dequantised)"
            )
    for name, entry in tensors.items():
        if entry.dtype not in DTYPE_BYTES:
            raise UnsupportedModelError(
                f"{folder}: tensor {name} is stored as {entry.dtype}, which is not supported; use "
                "a bfloat16, float16 or float32 version of the model"
            )
