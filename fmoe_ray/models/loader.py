"""From a checkpoint's name to a model that computes: dense weights on the device, experts in the
host store of this node.
"""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fmoe_ray.cache import HostStore
from fmoe_ray.models.architecture import Architecture, build_architecture
from fmoe_ray.models.checkpoint import Checkpoint, open_checkpoint, resolve
from fmoe_ray.models.layout import BlobLayout
from fmoe_ray.models.router import Gates, probe_gates
from fmoe_ray.models.weights import Progress, WeightReader


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """L = num_layers MoE layers of J = num_experts; expert j of layer l is blob l * J + j."""

    model: Any
    """The transformers model; its experts modules hold no weights."""
    experts: dict[str, nn.Module]
    layout: BlobLayout
    num_experts: int
    gates: Gates
    store: HostStore
    fingerprint: str
    """Of the checkpoint, whatever the type it is computed in."""
    device: torch.device
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def top_k(self) -> int:
        return self.gates.top_k

    @property
    def expert_bytes(self) -> int:
        return self.layout.blob_bytes

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])


def load_model(
    path: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    progress: Progress | None = None,
    timeout_s: float = 900.0,
) -> LoadedModel:
    """Loads `path` (`tiny`, a folder or a hub name); `dtype` None keeps the checkpoint's type.

    The host store of another process of this node is shared if it holds the same experts in the
    same type; `timeout_s` is how long to wait while that process fills it. Peak memory is the
    weights and a few megabytes. Raises ModelError, CapacityError.
    """
    folder = resolve(path)
    checkpoint = open_checkpoint(folder)
    architecture = build_architecture(folder, dtype)
    with WeightReader(checkpoint, architecture) as reader:
        reader.load_dense(device, architecture.model.dtype)
        gates = probe_gates(architecture.model, architecture.experts, architecture.num_experts)
        store = _open_store(checkpoint, architecture, timeout_s)
        if not store.is_complete:
            with ExitStack() as undo:
                undo.callback(store.close)  # or its memory would stay behind, half filled
                reader.load_experts(store, progress)
                store.seal()
                undo.pop_all()
    return LoadedModel(
        model=architecture.model,
        experts=architecture.experts,
        layout=architecture.layout,
        num_experts=architecture.num_experts,
        gates=gates,
        store=store,
        fingerprint=checkpoint.fingerprint,
        device=device,
        dtype=architecture.model.dtype,
    )


def _open_store(checkpoint: Checkpoint, architecture: Architecture, timeout_s: float) -> HostStore:
    return HostStore.create(
        store_name(checkpoint, architecture),
        store_fingerprint(checkpoint, architecture),
        architecture.num_layers * architecture.num_experts,
        architecture.layout.blob_bytes,
        timeout_s=timeout_s,
    )


def store_name(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """Of the host store that all processes of a node share; a file in shared memory."""
    return f"fmoe-{store_fingerprint(checkpoint, architecture)}"


def store_fingerprint(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """32 hex digits; equal where the blobs of a host store are equal byte by byte."""
    text = f"{checkpoint.fingerprint} {architecture.layout.describe()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
