"""Puts the GPU's parts together for a step runner, and says what runs slower than it could."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fmoe_ray.cache import Geometry, Offloader
from fmoe_ray.config import Settings
from fmoe_ray.engine.offloaded_experts import OffloadedExperts
from fmoe_ray.engine.packed_model import PackedModel
from fmoe_ray.engine.shard_group import ShardGroup
from fmoe_ray.engine.step_recorder import StepRecorder
from fmoe_ray.errors import EngineError, UnsupportedModelError
from fmoe_ray.gates import CudaGates
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.models.router import RouterTap

if TYPE_CHECKING:
    from fmoe_ray.engine.gpu.decode_step import DecodeStep
    from fmoe_ray.engine.gpu.slot_experts import SlotExperts

logger = logging.getLogger(__name__)

GRAPHS_BYTES = 1 << 30
"""Kept free for captured graphs, libraries and kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuParts:
    experts: "SlotExperts | OffloadedExperts"
    decode: "DecodeStep | None"
    gates: CudaGates | None

    def close(self) -> None:
        """Before experts and offloader are closed."""
        if self.gates is not None:
            self.gates.close()
        if self.decode is not None:
            self.decode.close()

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Around a forward pass of any rows: prompts, or prompts and single tokens together."""
        from fmoe_ray.kernels import ops

        if isinstance(self.experts, OffloadedExperts):
            yield
            return
        with torch.compiler.set_stance("force_eager"), ops.bind(self.experts):
            yield
            torch.cuda.current_stream().synchronize()  # computed before its slots are given up


def prepare_process() -> None:
    """Before CUDA starts: the graph, both copy streams and the answers need queues of their own."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def free_bytes(loaded: LoadedModel, max_prefill_tokens: int) -> int:
    """What expert slots may take of a GPU that holds dense weights and KV already."""
    free, _ = torch.cuda.mem_get_info(loaded.device)
    down = next(field for field in loaded.layout.fields if field.name == "down_proj")
    per_pair = 6 * sum(down.shape)  # inner in the model's type, the output's row in float32
    workspace = max_prefill_tokens * (loaded.top_k * per_pair + 32 * loaded.hidden_size)
    return free - workspace - GRAPHS_BYTES


def assemble_gpu(
    loaded: LoadedModel,
    model: PackedModel,
    offloader: Offloader,
    tap: RouterTap,
    recorder: StepRecorder | None,
    group: ShardGroup,
    settings: Settings,
) -> GpuParts:
    """Never fails for what it cannot speed up: that runs with transformers' own operations."""
    if settings.offload.record_path is not None:  # also on shards that do not record themselves
        logger.warning("recording a trace: experts are computed one by one, without our kernels")
        plain = OffloadedExperts(loaded, offloader, tap, recorder, group)
        return GpuParts(experts=plain, decode=None, gates=None)
    try:
        from fmoe_ray.engine.gpu.decode_step import DecodeStep
        from fmoe_ray.engine.gpu.slot_experts import SlotExperts

        experts = SlotExperts(loaded, offloader, tap, group)
    except (ImportError, UnsupportedModelError) as error:
        logger.warning("experts are computed one by one, without our kernels: %s", error)
        return GpuParts(
            experts=OffloadedExperts(loaded, offloader, tap, None, group), decode=None, gates=None
        )
    if not model.cache.is_read_in_place():
        logger.warning(
            "%s attends to something else than it stores: its decode steps are neither compiled "
            "nor captured",
            loaded.model.config.model_type,
        )
        return GpuParts(experts=experts, decode=None, gates=None)
    gates = _open_gates(loaded, offloader, experts, group, settings)
    decode = DecodeStep(
        loaded.model,
        model.cache,
        experts,
        gates=gates,
        num_slots=settings.engine.max_batch_size,
        max_batch=settings.engine.max_batch_size,
        max_experts_at_once=offloader.num_slots,
        top_k=loaded.top_k,
        num_experts=loaded.num_experts,
        device=loaded.device,
    )
    return GpuParts(experts=experts, decode=decode, gates=gates)


def _open_gates(
    loaded: LoadedModel,
    offloader: Offloader,
    experts: "SlotExperts",
    group: ShardGroup,
    settings: Settings,
) -> CudaGates | None:
    if not settings.engine.cuda_graphs:
        return None
    if group.size > 1:
        logger.warning("%d shards add up on the host: no CUDA graphs", group.size)
        return None
    # A policy that can do without it does: it looks one layer ahead, and an expert takes several
    # layers to load here, while steps launched kernel by kernel take several times as long.
    if offloader.needs_speculative:
        logger.warning(
            "policy %s needs the next layer's gate, which a CUDA graph does not show: decode steps "
            "are launched kernel by kernel",
            settings.offload.policy,
        )
        return None
    max_rows = 1
    while max_rows < settings.engine.max_batch_size:
        max_rows *= 2
    try:
        return CudaGates(
            offloader,
            Geometry(loaded.num_layers, loaded.num_experts, loaded.top_k),
            max_rows=max_rows,
            device=loaded.device.index,
            table_address=experts.table_LJ.data_ptr(),
            timeout_s=settings.offload.transfer_timeout_s,
        )
    except EngineError as error:
        logger.warning("decode steps are launched kernel by kernel: %s", error)
        return None
