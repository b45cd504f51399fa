"""The experts of a step on a CPU: asks for them, tells the predictor what the gates said, and
computes each one as soon as it is there.

Shape letters: T tokens of the step, K experts of a token, J experts of a layer, R rows.
"""

from typing import Any

import numpy as np
import torch

from fmoe_ray.cache import Geometry, Offloader
from fmoe_ray.config import OffloadSettings
from fmoe_ray.models.experts import Dispatch
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.models.router import RouterTap, mean_by_row


class OffloadedExperts:
    """Experts backend over the slots of an `Offloader`; one step at a time, on one thread."""

    def __init__(self, loaded: LoadedModel, offloader: Offloader, tap: RouterTap) -> None:
        self._offloader = offloader
        self._tap = tap
        self._rule = loaded.gates.rule
        self._routers = loaded.gates.routers
        self._num_experts = loaded.num_experts
        self._publishes = offloader.wants_gates
        self._speculates = offloader.wants_speculative
        self._slots = [loaded.layout.numpy_views(slot) for slot in offloader.arena]
        self._row_of_token_T = np.empty(0, np.int32)
        self._num_rows = 0

    def close(self) -> None:
        """Lets go of the slots' memory."""
        self._tap.close()
        self._slots.clear()

    def begin_step(self, tokens_of_row_R: list[int]) -> None:
        self._num_rows = len(tokens_of_row_R)
        self._row_of_token_T = np.repeat(np.arange(self._num_rows, dtype=np.int32), tokens_of_row_R)

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Batches of experts are computed in order of arrival; the sum does not depend on it."""
        chosen_TK = index_TK.to(torch.int32).numpy()
        self._offloader.request(layer, chosen_TK, self._row_of_token_T)
        dispatch = Dispatch(hidden_TH, index_TK, self._num_experts)
        while delivered := self._offloader.wait():
            for expert, slot in delivered:
                dispatch.compute(module, expert, self._slots[slot])
            self._offloader.release([expert for expert, _ in delivered])
        if self._publishes:
            self._publish(layer, chosen_TK)
        return dispatch.combine(weights_TK)

    def _publish(self, layer: int, chosen_TK: np.ndarray) -> None:
        chosen_RJ = np.zeros((self._num_rows, self._num_experts), np.uint8)
        token_N, position_N = np.nonzero(chosen_TK < self._num_experts)
        chosen_RJ[self._row_of_token_T[token_N], chosen_TK[token_N, position_N]] = 1
        gate = self._tap.take()
        if gate is None:  # no router decided: what was chosen is all there is to know
            probs_RJ = chosen_RJ / chosen_RJ.sum(1, keepdims=True, dtype=np.float32)
            self._offloader.publish_gate(layer, probs_RJ, chosen_RJ, None)
            return
        _, args, output_TJ = gate
        following = self._routers[layer + 1] if layer + 1 < len(self._routers) else None
        speculative_RJ = None
        if self._speculates and following is not None:
            speculative_RJ = self._by_row(self._tap.speculate(following, args))
        self._offloader.publish_gate(layer, self._by_row(output_TJ), chosen_RJ, speculative_RJ)

    def _by_row(self, output_TJ: torch.Tensor) -> np.ndarray:
        """float32 [R, J]"""
        probs_TJ = self._rule.distribution(output_TJ)
        rows_T = torch.from_numpy(self._row_of_token_T)
        return mean_by_row(probs_TJ, rows_T, self._num_rows).numpy()


def open_offloader(loaded: LoadedModel, settings: OffloadSettings) -> Offloader:
    """Slots for the budget, served from the model's host store by the policy of the settings.

    Raises ConfigError for a budget below top_k experts or an unknown policy, CapacityError.
    """
    num_slots = settings.budget.slots(
        num_experts=loaded.num_layers * loaded.num_experts,
        expert_bytes=loaded.layout.blob_bytes,
        min_slots=loaded.top_k,
    )
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
    )
