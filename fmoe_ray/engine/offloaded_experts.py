"""The experts of a step one by one, with the operations of transformers: asks for them, tells the
predictor what the gates said, and computes each one as soon as it is there. On a CPU, and on a GPU
for experts that our kernels do not know.

Shape letters: T tokens of the step, K experts of a token, J experts of a layer, R rows.
"""

import logging
from typing import Any, Protocol

import numpy as np
import torch

from fmoe_ray.cache import Geometry, Offloader
from fmoe_ray.config import Budget, OffloadSettings
from fmoe_ray.engine.shard_group import (
    ALONE,
    ShardGroup,
    own_experts,
    own_experts_of_layer,
)
from fmoe_ray.engine.step_recorder import StepRecorder
from fmoe_ray.errors import CapacityError, ConfigError
from fmoe_ray.models.experts import Dispatch, ExpertsBackend
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.models.router import RouterTap, mean_by_row
from fmoe_ray.policy import PolicyParts

logger = logging.getLogger(__name__)


class StepExperts(ExpertsBackend, Protocol):
    """The experts of one step after the other."""

    @property
    def gate_rule(self) -> str:
        """How a gate's output becomes a distribution; a name of `models.router.RULES`."""

    def begin_step(self, tokens_of_row_R: list[int]) -> None:
        """Before the forward pass of a step with these rows."""

    def close(self) -> None:
        """Lets go of the slots' memory."""


class OffloadedExperts:
    """Experts backend over the slots of an `Offloader`; one step at a time, on one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        offloader: Offloader,
        tap: RouterTap,
        recorder: StepRecorder | None = None,
        group: ShardGroup = ALONE,
    ) -> None:
        self._offloader = offloader
        self._tap = tap
        self._recorder = recorder
        self._group = group
        self._rule = loaded.gates.rule
        self._routers = loaded.gates.routers
        self._num_experts = loaded.num_experts
        self._publishes = offloader.wants_gates
        self._speculates = offloader.wants_speculative or recorder is not None
        self._slots = [
            loaded.layout.views(slot[: loaded.layout.blob_bytes])
            for slot in device_arena(offloader, loaded.device)
        ]
        self._row_of_token_T = np.empty(0, np.int32)
        self._num_rows = 0

    @property
    def gate_rule(self) -> str:
        return self._rule.name

    def close(self) -> None:
        """Lets go of the slots' memory."""
        self._tap.close()
        self._slots.clear()

    def begin_step(self, tokens_of_row_R: list[int]) -> None:
        self._num_rows = len(tokens_of_row_R)
        self._row_of_token_T = np.repeat(np.arange(self._num_rows, dtype=np.int32), tokens_of_row_R)
        if self._recorder is not None:
            self._recorder.begin_step()

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Batches of experts are computed in order of arrival; the sum does not depend on it."""
        chosen_TK = index_TK.to(torch.int32).cpu().numpy()
        self._offloader.request(layer, chosen_TK, self._row_of_token_T)
        # Published before the wait, so that prefetches it leads to move while the layer computes.
        if self._publishes or self._recorder is not None:
            chosen_TJ = self._chosen(index_TK)
            probs_TJ, speculative_TJ = self._gates(layer, chosen_TJ)
            if self._publishes:
                self._publish(layer, chosen_TJ, probs_TJ, speculative_TJ)
            if self._recorder is not None:
                self._recorder.add_layer(index_TK, weights_TK, probs_TJ, speculative_TJ)
        mine = own_experts_of_layer(self._group, layer, self._num_experts)
        dispatch = Dispatch(hidden_TH, index_TK, self._num_experts, mine)
        while delivered := self._offloader.wait():
            for expert, slot in delivered:
                dispatch.compute(module, expert, self._slots[slot])
            if hidden_TH.is_cuda:  # launched is not computed
                torch.cuda.current_stream().synchronize()
            self._offloader.release([expert for expert, _ in delivered])
        self._group.add_up(dispatch.outputs)
        return dispatch.combine(weights_TK)

    def _chosen(self, index_TK: torch.Tensor) -> torch.Tensor:
        """float32 [T, J], 1 where the token chose the expert."""
        beyond = index_TK.new_zeros(len(index_TK), self._num_experts + 1, dtype=torch.float32)
        ids_TK = index_TK.clamp_max(self._num_experts)
        return beyond.scatter_(1, ids_TK, 1.0)[:, : self._num_experts]

    def _gates(
        self, layer: int, chosen_TJ: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """float32 [T, J] of this layer, and of the next where it is wanted."""
        gate = self._tap.take()
        if gate is None:  # no router decided: what was chosen is all there is to know
            return chosen_TJ / chosen_TJ.sum(1, keepdim=True).clamp_min(1.0), None
        _, args, output_TJ = gate
        following = self._routers[layer + 1] if layer + 1 < len(self._routers) else None
        speculative_TJ = None
        if self._speculates and following is not None:
            speculative_TJ = self._rule.distribution(self._tap.speculate(following, args))
        return self._rule.distribution(output_TJ), speculative_TJ

    def _publish(
        self,
        layer: int,
        chosen_TJ: torch.Tensor,
        probs_TJ: torch.Tensor,
        speculative_TJ: torch.Tensor | None,
    ) -> None:
        rows_T = torch.from_numpy(self._row_of_token_T).to(probs_TJ.device)

        def by_row(values_TJ: torch.Tensor) -> torch.Tensor:
            return mean_by_row(values_TJ, rows_T, self._num_rows).contiguous().cpu()

        self._offloader.publish_gate(
            layer,
            by_row(probs_TJ).numpy(),
            (by_row(chosen_TJ) > 0).to(torch.uint8).numpy(),
            None if speculative_TJ is None else by_row(speculative_TJ).numpy(),
        )


class _DeviceMemory:
    """Memory of a GPU at an address, for `torch.as_tensor`."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_arena(offloader: Offloader, device: torch.device) -> torch.Tensor:
    """uint8 [num_slots, slot_stride_bytes] where the slots lie; valid until the offloader is closed
    on a GPU, and while it is referenced on a CPU.
    """
    if device.type == "cpu":
        return torch.from_numpy(offloader.arena)
    shape = (offloader.num_slots, offloader.slot_stride_bytes)
    return torch.as_tensor(_DeviceMemory(offloader.arena_address, shape), device=device)


def open_offloader(
    loaded: LoadedModel,
    settings: OffloadSettings,
    group: ShardGroup = ALONE,
    policy_parts: PolicyParts | None = None,
    free_bytes: int | None = None,
) -> Offloader:
    """Slots for the budget, served from the model's host store by the policy of the settings, or by
    the given one.

    Budget and slots are those of this shard, for its own experts. `free_bytes` of the device is
    what an automatic budget may take; None: as much as it likes. Raises ConfigError for more
    shards than experts, a budget below top_k experts or an unknown policy, CapacityError.
    """
    num_all = loaded.num_layers * loaded.num_experts
    num_own = len(own_experts(group, num_all))
    if num_own == 0:
        raise ConfigError(
            f"shards.num_shards {group.size}: the model has {num_all} experts, and each shard "
            "needs one at least"
        )
    budget, min_slots = settings.budget, min(loaded.top_k, num_own)
    blob_bytes = loaded.layout.blob_bytes
    if budget.is_automatic and free_bytes is not None:
        if free_bytes < min_slots * blob_bytes:
            raise CapacityError(
                f"offload.budget auto: {free_bytes} bytes are left for experts; a token needs "
                f"{min_slots} of {blob_bytes} bytes: free memory, or lower engine.max_batch_size "
                "or engine.max_context"
            )
        budget = Budget(num_bytes=free_bytes)
    num_slots = budget.slots(num_experts=num_own, expert_bytes=blob_bytes, min_slots=min_slots)
    if settings.budget.is_automatic:
        logger.info("offload.budget auto: slots for %d of %d experts", num_slots, num_own)
    return Offloader(
        loaded.store,
        Geometry(loaded.num_layers, loaded.num_experts, loaded.top_k),
        num_slots,
        settings.policy,
        eviction=settings.eviction,
        prefetch_distance=settings.prefetch_distance,
        store_capacity=settings.store_capacity,
        embedding_size=loaded.hidden_size,
        chunk_bytes=settings.chunk_bytes,
        prefetch_depth=settings.prefetch_depth,
        link_gbps=settings.link_gbps,
        timeout_s=settings.transfer_timeout_s,
        shard=group.rank,
        num_shards=group.size,
        policy_object=None if policy_parts is None else policy_parts.policy,
        predictor_object=None if policy_parts is None else policy_parts.predictor,
        cuda_device=loaded.device.index if loaded.device.type == "cuda" else None,
    )
