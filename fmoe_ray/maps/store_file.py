"""An expert-map store on disk: safetensors, with a header in its metadata. Knows no live store."""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fmoe_ray.errors import FingerprintError, StoreError

FORMAT = "fmoe-expert-maps"
VERSION = 2
_MAX_NUMBER = 2**31  # of the core's integers


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHeader:
    """What a store is of. All but capacity and size must agree before two are merged."""

    fingerprint: str
    num_layers: int
    num_experts: int
    top_k: int
    embedding_size: int
    prefetch_distance: int
    capacity: int
    size: int

    def require_like(self, other: "StoreHeader", *, source: str = "store") -> None:
        """Raises FingerprintError or StoreError, naming both values."""
        if self.fingerprint != other.fingerprint:
            raise FingerprintError(
                f"{source}: maps of model {self.fingerprint!r}, needed {other.fingerprint!r}; "
                "give the store that this model recorded, or another path to begin a new one"
            )
        for name in (
            "num_layers",
            "num_experts",
            "top_k",
            "embedding_size",
            "prefetch_distance",
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise StoreError(
                    f"{source}: {name} is {mine}, needed {theirs}; "
                    "use the same model and settings, or another path to begin a new store"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreContent:
    """N entries."""

    probs: NDArray[np.float16]
    """[N, L, J]"""
    embeddings: NDArray[np.float16]
    """[N, h], of length 1 or 0"""
    chosen: NDArray[np.bool_]
    """[N, L, J]"""
    token_ids: NDArray[np.int32]
    """[N], -1 where there is none or many"""
    predecessors: NDArray[np.int32]
    """[N] index of the same request's iteration before, -1 where it is not stored"""


def write_store(path: str | os.PathLike[str], header: StoreHeader, content: StoreContent) -> None:
    """Replaces the file at once or not at all. Raises StoreError if it cannot be written."""
    num_experts = header.num_layers * header.num_experts
    tensors: dict[str, NDArray[Any]] = {
        "probs": np.ascontiguousarray(content.probs),
        "embeddings": np.ascontiguousarray(content.embeddings),
        "chosen": np.packbits(content.chosen.reshape(header.size, num_experts), axis=1),
        "token_ids": np.ascontiguousarray(content.token_ids),
        "predecessors": np.ascontiguousarray(content.predecessors),
    }
    header_text = json.dumps(asdict(header))
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "header": header_text,
        "sha256": _digest(header_text, tensors),
    }
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            try:
                file.write(save(tensors, metadata))
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def read_header(path: str | os.PathLike[str]) -> StoreHeader:
    """The header alone, whatever the size of the file, and so without its checksum. Raises
    StoreError if it is no store.
    """
    return _parse_header(path, _open(path)[0])


def read_store(path: str | os.PathLike[str]) -> tuple[StoreHeader, StoreContent]:
    """Raises StoreError for a file that is damaged, truncated or no store."""
    metadata, tensors = _open(path, with_tensors=True)
    header = _parse_header(path, metadata)
    n, num_experts = header.size, header.num_layers * header.num_experts
    expected = {
        "probs": ("float16", (n, header.num_layers, header.num_experts)),
        "embeddings": ("float16", (n, header.embedding_size)),
        "chosen": ("uint8", (n, (num_experts + 7) // 8)),
        "token_ids": ("int32", (n,)),
        "predecessors": ("int32", (n,)),
    }
    found = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise StoreError(f"{path}: damaged: it holds {found}, its header asks for {expected}")
    if metadata.get("sha256") != _digest(metadata["header"], tensors):
        raise StoreError(f"{path}: damaged: header and content do not have the file's checksum")
    predecessors = tensors["predecessors"]
    if n and not (-1 <= predecessors.min() and predecessors.max() < n):
        raise StoreError(f"{path}: damaged: a predecessor lies outside the {n} entries")
    chosen = np.unpackbits(tensors["chosen"], axis=1, count=num_experts).astype(np.bool_)
    return header, StoreContent(
        probs=tensors["probs"],
        embeddings=tensors["embeddings"],
        chosen=chosen.reshape(tensors["probs"].shape),
        token_ids=tensors["token_ids"],
        predecessors=predecessors,
    )


def _open(
    path: str | os.PathLike[str], *, with_tensors: bool = False
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            names = file.keys() if with_tensors else ()
            return metadata, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise StoreError(f"{path}: damaged or no expert-map store: {error}") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse_header(path: str | os.PathLike[str], metadata: dict[str, str]) -> StoreHeader:
    if metadata.get("format") != FORMAT:
        raise StoreError(f"{path}: no expert-map store: format is {metadata.get('format')!r}")
    if metadata.get("version") != str(VERSION):
        raise StoreError(
            f"{path}: version {metadata.get('version')!r}, this program reads {VERSION}; "
            "record a new store with it"
        )
    try:
        values = json.loads(metadata["header"])
        header = StoreHeader(**values)
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
        raise StoreError(f"{path}: damaged header: {error}") from error
    for field in fields(StoreHeader):
        value = getattr(header, field.name)
        is_number = isinstance(value, int) and 0 <= value < _MAX_NUMBER
        if not (isinstance(value, str) if field.type is str else is_number):
            raise StoreError(f"{path}: damaged header: {field.name} is {values[field.name]!r}")
    return header


def _digest(header: str, tensors: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()
