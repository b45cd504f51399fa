"""Every gate's full distribution over its layer's experts, seen as the model computes.

It only feeds prediction: nothing here can change what the model computes.

Shape letters: T tokens, J experts of a layer, K experts of a token, R rows (requests) of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from fmoe_ray.errors import UnsupportedModelError
from fmoe_ray.models.experts import bind_experts

PROBE_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRule:
    """How a family turns a gate's output into scores; one of `RULES` by name."""

    name: str

    def distribution(self, output_TJ: torch.Tensor) -> torch.Tensor:
        """float32 [T, J], each row sums to 1."""
        scores = RULES[self.name](output_TJ.float())
        if self.name == "softmax":
            return scores
        return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda output: output.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda output: functional.softplus(output).sqrt(),
    "given": lambda output: output.clamp_min(0.0),
}
"""The scores that families weight their experts with. `given`: the gate puts out probabilities."""


def classify(output_TJ: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> GateRule:
    """The rule whose scores of the chosen experts are the routing weights up to a factor per token.

    Renormalising, scaling and a softmax over the chosen logits alone all are such factors. A family
    that fits none (sparsemixer, learned temperatures) gets `softmax`: its own order of experts,
    normalised.
    """
    if index_TK.shape[1] > 1:
        for name, scores in RULES.items():
            chosen = scores(output_TJ.float()).gather(1, index_TK)
            ratio = weights_TK.float() / chosen
            spread = (ratio.amax(1) - ratio.amin(1)) / ratio.abs().amax(1).clamp_min(1e-9)
            if bool(torch.isfinite(ratio).all()) and float(spread.max()) < 2e-3:
                return GateRule(name=name)
    return GateRule(name="softmax")


class RouterTap:
    """Forward hooks on a model's routers that keep the last router's input and output.

    A router runs directly before the experts of its layer, so `take` inside the experts function
    is that layer's gate. Not for two threads at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last: tuple[nn.Module, tuple[Any, ...], torch.Tensor] | None = None
        self._handles = []
        for module, index in _routers(model):
            module._fmoe_gate_index = index  # type: ignore[assignment]
            self._handles.append(module.register_forward_hook(self._seen))

    def _seen(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._last = (module, args, self._gate_output(module, output))

    def _gate_output(self, module: nn.Module, output: Any) -> torch.Tensor:
        # On the module itself, so that one compiled layer serves all.
        index: int = module._fmoe_gate_index  # type: ignore[assignment]
        gate: torch.Tensor = output[index] if isinstance(output, tuple) else output
        return gate.reshape(-1, gate.shape[-1])

    def take(self) -> tuple[nn.Module, tuple[Any, ...], torch.Tensor] | None:
        """(router, its arguments, its output [T, J]) since the last call; None if no router ran."""
        last, self._last = self._last, None
        return last

    def speculate(self, router: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
        """Another layer's gate on the given router input, [T, J]; seen by no hook."""
        return self._gate_output(router, router.forward(*args))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """(router, position of the gate's output in its result): what the family itself declares."""
    recorders: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            declared = (getattr(type(module), "_can_record_outputs", None) or {}).get(
                "router_logits", []
            )
            recorders += declared if isinstance(declared, list) else [declared]
    found: dict[nn.Module, int] = {}
    for recorder in recorders:
        if not isinstance(recorder, OutputRecorder):
            recorder = OutputRecorder(recorder, index=1)
        for name, module in model.named_modules():
            in_layer = recorder.layer_name is None or recorder.layer_name.strip(".") in name
            if in_layer and isinstance(module, recorder.target_class or ()):
                found.setdefault(module, recorder.index)
    return list(found.items())


@dataclass(frozen=True, kw_only=True)
class Gates:
    """What one probe forward tells of a model's gates."""

    top_k: int
    rule: GateRule
    routers: list[nn.Module | None]
    """By MoE layer; None where the choice is no router's."""


class _Probe:
    """Experts backend that computes nothing and notes what the gates said."""

    def __init__(self, tap: RouterTap) -> None:
        self._tap = tap
        self.routers: dict[int, nn.Module | None] = {}
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.top_k = 0

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        gate = self._tap.take()
        self.routers[layer] = None if gate is None else gate[0]
        self.top_k = index_TK.shape[1]
        if gate is not None:
            self.seen.append((gate[2], index_TK, weights_TK))
        return torch.zeros_like(hidden_TH)


def probe_gates(model: Any, experts: dict[str, nn.Module], num_experts: int) -> Gates:
    """Runs one short forward pass without experts; binds a backend, so bind yours afterwards.

    Raises UnsupportedModelError for gates that do not tell of every expert.
    """
    tap = RouterTap(model)
    probe = _Probe(tap)
    bind_experts(experts.values(), probe)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] % vocab_size
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=False)
    finally:
        tap.close()
    family = model.config.model_type
    if len(probe.routers) != len(experts):
        raise UnsupportedModelError(
            f"{family}: {len(probe.routers)} of {len(experts)} MoE layers ran in a forward pass"
        )
    widths = {gate.shape[1] for gate, _, _ in probe.seen}
    if widths - {num_experts}:
        raise UnsupportedModelError(
            f"{family}: a gate over {sorted(widths)} choices for {num_experts} experts"
        )
    rule = GateRule(name="softmax")
    if probe.seen:
        gates, indices, weights = zip(*probe.seen, strict=True)
        rule = classify(torch.cat(gates), torch.cat(indices), torch.cat(weights))
    return Gates(
        top_k=probe.top_k,
        rule=rule,
        routers=[probe.routers[layer] for layer in range(len(experts))],
    )


def mean_by_row(
    values_TJ: torch.Tensor, row_of_token_T: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """float32 [R, J]: the mean over each row's tokens, as the map of a prefill iteration is."""
    if len(values_TJ) == num_rows:
        return values_TJ
    sums = values_TJ.new_zeros(num_rows, values_TJ.shape[1])
    sums.index_add_(0, row_of_token_T, values_TJ)
    counts = torch.bincount(row_of_token_T, minlength=num_rows).clamp_min(1)
    return sums / counts[:, None]
