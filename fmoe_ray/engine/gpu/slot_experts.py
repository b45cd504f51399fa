"""The experts of a step on a GPU, computed in their slots.

A layer gets its experts in one of two ways, with the same kernels and so the same bits:
`GraphGate` asks from within a CUDA graph and waits on the GPU; otherwise the host reads the choice,
waits, and computes what arrives, in waves where a layer needs more experts than there are slots.

Shape letters: T tokens of the step, K experts of a token, J experts of a layer, R rows, H hidden.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fmoe_ray.cache import Offloader
from fmoe_ray.engine.gpu.expert_layout import kernel_layout
from fmoe_ray.engine.offloaded_experts import device_arena
from fmoe_ray.engine.shard_group import ALONE, ShardGroup
from fmoe_ray.errors import UnsupportedModelError
from fmoe_ray.gates import CudaGates
from fmoe_ray.kernels import experts as kernels
from fmoe_ray.kernels import routing
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.models.router import RouterTap, mean_by_row

MAX_REPLAYED_ROWS = 64
"""Decode rows whose routing can be replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphGate:
    """The layers ask through `gates`; `live` int32 [1] on the GPU says how many rows count."""

    gates: CudaGates
    live: torch.Tensor


class SlotExperts:
    """Experts backend over slots on a GPU; one step at a time, on one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        offloader: Offloader,
        tap: RouterTap,
        group: ShardGroup = ALONE,
    ) -> None:
        """Raises UnsupportedModelError for experts that the kernels cannot compute."""
        modules = list(loaded.experts.values())
        layout = kernel_layout(loaded.layout, modules[0], offloader.slot_stride_bytes)
        if layout is None:
            raise UnsupportedModelError(
                f"{loaded.model.config.model_type}: its experts have a gate function or parameters "
                "that the GPU kernels do not know"
            )
        self._layout = layout
        self._offloader = offloader
        self._tap = tap
        self._group = group
        self._rule = loaded.gates.rule
        self._routers = loaded.gates.routers
        self._num_experts = loaded.num_experts
        self._device = loaded.device
        self._arena = device_arena(offloader, loaded.device).view(-1)
        self._arena = self._arena.view(loaded.layout.fields[0].dtype)
        self.table_LJ = torch.full(
            (loaded.num_layers, loaded.num_experts), -1, dtype=torch.int32, device=loaded.device
        )
        """Slot of each expert, as the graphs read it; written by the gate server alone."""
        self._wave_J = torch.empty(loaded.num_experts, dtype=torch.int32, pin_memory=True)
        self._row_of_token_T = np.empty(0, np.int32)
        self._num_rows = 0
        self._graph: GraphGate | None = None
        self._replay_LTK: torch.Tensor | None = None
        self._replay_step_LRK: torch.Tensor | None = None
        for layer, module in enumerate(modules):
            module._fmoe_expert_layer = torch.tensor(layer)

    @property
    def gate_rule(self) -> str:
        return self._rule.name

    def close(self) -> None:
        """Lets go of the slots' memory."""
        self._tap.close()
        self._arena = torch.empty(0, dtype=self._arena.dtype)

    def begin_step(self, tokens_of_row_R: list[int]) -> None:
        """The next layers ask from the host."""
        self._graph = None
        self._num_rows = len(tokens_of_row_R)
        self._row_of_token_T = np.repeat(np.arange(self._num_rows, dtype=np.int32), tokens_of_row_R)

    def begin_graph(self, gate: GraphGate) -> None:
        """The next layers ask from within a graph."""
        self._graph = gate

    def replay(self, ids_LTK: torch.Tensor | None) -> None:
        """Replaces every gate's choice; int [L, >= T, K]. Graphs captured while a choice is being
        replayed read it at one address, so they go on following `replay`.
        """
        if ids_LTK is None:
            self._replay_LTK = None
            return
        num_layers, num_tokens, top_k = ids_LTK.shape
        if self._replay_step_LRK is None:
            self._replay_step_LRK = torch.zeros(
                num_layers, MAX_REPLAYED_ROWS, top_k, dtype=torch.int32, device=self._device
            )
        if num_tokens > MAX_REPLAYED_ROWS:
            self._replay_LTK = ids_LTK.to(self._device, torch.int32)
            return
        self._replay_step_LRK[:, :num_tokens] = ids_LTK.to(self._device, torch.int32)
        torch.cuda.synchronize(self._device)
        self._replay_LTK = self._replay_step_LRK

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Experts backend. Compilable: `layer` is read on the host only, from a tensor, so that one
        compiled layer serves all.
        """
        gate = self._tap.take()
        nothing = hidden_TH.new_empty(0)
        scores_TJ = nothing if gate is None else gate[2]
        router_input = nothing if gate is None or len(gate[1]) != 1 else gate[1][0]
        weighted_TKH: torch.Tensor = torch.ops.fmoe.experts(
            hidden_TH, index_TK, weights_TK, scores_TJ, router_input, module._fmoe_expert_layer
        )
        return weighted_TKH.sum(1).to(hidden_TH.dtype)

    def experts(
        self,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        scores_TJ: torch.Tensor,
        router_input: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """`ops.StepState.experts`: what the operator in `forward` runs."""
        if self._replay_LTK is not None:
            index_TK = self._replay_LTK[layer, : len(index_TK)]
            scores_TJ = scores_TJ.new_empty(0)
        scores = scores_TJ if scores_TJ.numel() else None
        dtype = torch.promote_types(hidden_TH.dtype, weights_TK.dtype)
        out_TKH = torch.zeros(  # pairs without expert contribute nothing
            (*index_TK.shape, hidden_TH.shape[1]), dtype=dtype, device=hidden_TH.device
        )
        hidden_TH, weights_TK = hidden_TH.contiguous(), weights_TK.contiguous()
        if self._graph is not None:
            self._ask_on_gpu(self._graph, hidden_TH, index_TK, weights_TK, scores, layer, out_TKH)
        else:
            speculative = self._speculate(router_input, layer)
            self._ask_on_host(hidden_TH, index_TK, weights_TK, scores, speculative, layer, out_TKH)
        return out_TKH

    def _ask_on_gpu(
        self,
        gate: GraphGate,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        scores_TJ: torch.Tensor | None,
        layer: int,
        out_TKH: torch.Tensor,
    ) -> None:
        ids_TK = routing.publish(
            index_TK,
            scores_TJ,
            self._rule.name,
            gate.live,
            self._num_experts,
            gate.gates.chosen_address(layer),
            gate.gates.probs_address(layer),
        )
        if torch.cuda.is_current_stream_capturing():  # otherwise a dry run, and no row counts
            gate.gates.enqueue(layer, torch.cuda.current_stream().cuda_stream)
        kernels.experts(
            hidden_TH, ids_TK, weights_TK, self.table_LJ[layer], self._arena, self._layout, out_TKH
        )

    def _ask_on_host(
        self,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        scores_TJ: torch.Tensor | None,
        speculative_TJ: torch.Tensor | None,
        layer: int,
        out_TKH: torch.Tensor,
    ) -> None:
        num_tokens = len(self._row_of_token_T)
        ids_TK = index_TK.to(torch.int32).contiguous()
        if num_tokens < len(ids_TK):  # rows that pad a decode step up to its bucket
            ids_TK = ids_TK.clone()
            ids_TK[num_tokens:] = self._num_experts
        chosen_TK = ids_TK[:num_tokens].cpu().numpy()  # waits: the previous layer is computed
        self._offloader.request(layer, chosen_TK, self._row_of_token_T)
        # Published before the wait, so that prefetches it leads to move while the layer computes.
        if self._offloader.wants_gates:
            self._publish(layer, chosen_TK, scores_TJ, speculative_TJ)
        needs_waves = len(np.unique(chosen_TK)) > self._offloader.num_slots
        while delivered := self._offloader.wait():
            self._wave_J.fill_(-1)
            for expert, slot in delivered:
                self._wave_J[expert] = slot
            wave_J = self._wave_J.to(self._device)
            kernels.experts(
                hidden_TH, ids_TK, weights_TK, wave_J, self._arena, self._layout, out_TKH
            )
            if needs_waves:
                torch.cuda.current_stream().synchronize()
                self._offloader.release([expert for expert, _ in delivered])
        self._group.add_up(out_TKH)

    def _speculate(self, router_input: torch.Tensor, layer: int) -> torch.Tensor | None:
        following = self._routers[layer + 1] if layer + 1 < len(self._routers) else None
        if following is None or not self._offloader.wants_speculative or not router_input.numel():
            return None
        return self._tap.speculate(following, (router_input,))

    def _publish(
        self,
        layer: int,
        chosen_TK: np.ndarray,
        scores_TJ: torch.Tensor | None,
        speculative_TJ: torch.Tensor | None,
    ) -> None:
        chosen_RJ = np.zeros((self._num_rows, self._num_experts), np.uint8)
        token_N, position_N = np.nonzero(chosen_TK < self._num_experts)
        chosen_RJ[self._row_of_token_T[token_N], chosen_TK[token_N, position_N]] = 1
        if scores_TJ is None:  # no router decided: what was chosen is all there is to know
            probs_RJ = chosen_RJ / chosen_RJ.sum(1, keepdims=True, dtype=np.float32)
        else:
            probs_RJ = self._by_row(scores_TJ)
        speculative_RJ = None if speculative_TJ is None else self._by_row(speculative_TJ)
        self._offloader.publish_gate(layer, probs_RJ, chosen_RJ, speculative_RJ)

    def _by_row(self, output_TJ: torch.Tensor) -> np.ndarray:
        """float32 [R, J]"""
        num_tokens = len(self._row_of_token_T)
        probs_TJ = self._rule.distribution(output_TJ[:num_tokens])
        rows_T = torch.from_numpy(self._row_of_token_T).to(self._device)
        return mean_by_row(probs_TJ, rows_T, self._num_rows).cpu().numpy()
