"""transformers' experts layer, computed by a backend of ours instead of the module's own weights.

`fmoe` is an experts implementation like `eager` or `grouped_mm`: registered once, it hands every
MoE layer's tokens to the backend bound to the model, which finds the weights.

Shape letters: T tokens, K experts of a token, H hidden size, N tokens of one expert.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

IMPLEMENTATION = "fmoe"


class ExpertsBackend(Protocol):
    """Computes the experts of one MoE layer."""

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H], of the type of `hidden_TH`. Expert ids >= num_experts contribute nothing."""


class NoExperts:
    """A backend whose experts contribute nothing: for a pass that only looks at the rest."""

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        return torch.zeros_like(hidden_TH)


def bind_experts(modules: Iterable[nn.Module], backend: ExpertsBackend) -> None:
    """From now on `backend` computes these experts modules, numbered in the given order."""
    for layer, module in enumerate(modules):
        module._fmoe_layer = layer  # type: ignore[assignment]
        module._fmoe_backend = backend  # type: ignore[assignment]


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    backend: ExpertsBackend = self._fmoe_backend
    return backend.forward(self, self._fmoe_layer, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(IMPLEMENTATION, _forward)


def compute_expert(
    module: Any, weights: dict[str, torch.Tensor], hidden_NH: torch.Tensor
) -> torch.Tensor:
    """One expert on its tokens, [N, H], before the routing weight.

    The same operations as transformers' `eager` per expert, so equal bit by bit to it, for every
    kind of expert that the interface describes.
    """
    inner = _linear(module, weights, "gate_up_proj" if module.has_gate else "up_proj", hidden_NH)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _linear(module, weights, "down_proj", inner)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    return outer


def _linear(
    module: Any, weights: dict[str, torch.Tensor], name: str, inputs: torch.Tensor
) -> torch.Tensor:
    weight = weights[name]
    bias = weights.get(f"{name}_bias")
    if not module.is_transposed:
        return functional.linear(inputs, weight, bias)
    product = inputs @ weight
    return product if bias is None else product + bias


class Dispatch:
    """Tokens of one layer grouped by expert, and the sum that puts them together again.

    Each (token, k) output has its own row and the K rows of a token are added in the order of k,
    whatever order the experts were computed in: bit-equal to transformers' `grouped_mm`.
    """

    def __init__(
        self,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        num_experts: int,
        mine: range | None = None,
    ) -> None:
        """`mine` are the experts computed here, all of them if not given."""
        if mine is None:
            mine = range(num_experts)
        self._hidden_TH = hidden_TH
        self._num_tokens, self._top_k = index_TK.shape
        flat = index_TK.reshape(-1)
        sorted_ids, self._order = torch.sort(flat, stable=True)
        ids = sorted_ids.tolist()
        self._inputs = hidden_TH[self._order // self._top_k]
        self._rows: dict[int, tuple[int, int]] = {}
        begin = 0
        for row in range(1, len(ids) + 1):
            if row == len(ids) or ids[row] != ids[begin]:
                if ids[begin] in mine:
                    self._rows[ids[begin]] = (begin, row)
                begin = row
        self.outputs = hidden_TH.new_zeros(len(ids), hidden_TH.shape[-1])
        """[T * K, H] in the order of experts; zero until an expert was computed."""

    @property
    def experts(self) -> list[int]:
        """To be computed here; ascending, each once."""
        return list(self._rows)

    def compute(self, module: Any, expert: int, weights: dict[str, torch.Tensor]) -> None:
        begin, end = self._rows.pop(expert)
        self.outputs[begin:end] = compute_expert(module, weights, self._inputs[begin:end])

    def combine(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """[T, H]; every expert has been computed, here or by others that added their outputs."""
        assert not self._rows, f"experts {self.experts} were not computed"
        scattered = torch.empty_like(self.outputs)
        scattered[self._order] = self.outputs
        weighted = scattered * weights_TK.reshape(-1, 1)
        summed = weighted.view(self._num_tokens, self._top_k, -1).sum(dim=1)
        return summed.to(self._hidden_TH.dtype)
