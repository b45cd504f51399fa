from typing import Any

import pytest
import torch
from torch.nn import functional

from fmoe_ray.evaluate.tiny_models import EXPERTS, TOP_K, VOCAB, tiny_model
from fmoe_ray.models.architecture import is_experts_module
from fmoe_ray.models.experts import bind_experts
from fmoe_ray.models.router import GateRule, RouterTap, classify, mean_by_row, probe_gates

LOGITS = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(0)) * 2
INDEX = LOGITS.topk(3).indices


def chosen(scores: torch.Tensor) -> torch.Tensor:
    return scores.gather(1, INDEX)


@pytest.mark.parametrize(
    ("rule", "output", "weights"),
    [
        ("softmax", LOGITS, chosen(LOGITS.softmax(-1))),
        ("softmax", LOGITS, chosen(LOGITS).softmax(-1)),
        ("softmax", LOGITS, functional.normalize(chosen(LOGITS.softmax(-1)), p=1) * 2.5),
        ("sigmoid", LOGITS, chosen(LOGITS.sigmoid())),
        ("sigmoid", LOGITS, functional.normalize(chosen(LOGITS.sigmoid()), p=1) * 1.5),
        ("sqrtsoftplus", LOGITS, chosen(functional.softplus(LOGITS).sqrt())),
        ("given", LOGITS.softmax(-1), chosen(LOGITS.softmax(-1))),
    ],
)
def test_the_rule_is_the_score_that_gives_the_weights_up_to_a_factor(
    rule: str, output: torch.Tensor, weights: torch.Tensor
) -> None:
    assert classify(output, INDEX, weights).name == rule


def test_weights_that_fit_no_rule_are_read_as_softmax() -> None:
    weights = torch.rand(INDEX.shape, generator=torch.Generator().manual_seed(1))
    assert classify(LOGITS, INDEX, weights).name == "softmax"


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus", "given"])
def test_every_rule_gives_a_distribution_in_the_order_of_its_scores(name: str) -> None:
    output = LOGITS.softmax(-1) if name == "given" else LOGITS
    probs = GateRule(name=name).distribution(output)
    assert probs.dtype == torch.float32
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)))
    assert torch.equal(probs.topk(3).indices, INDEX)


def test_a_row_of_many_tokens_gets_the_mean_of_their_distributions() -> None:
    probs = LOGITS.softmax(-1)[:6]
    rows = torch.tensor([0, 0, 0, 1, 2, 2])
    expected = torch.stack([probs[:3].mean(0), probs[3], probs[4:].mean(0)])
    torch.testing.assert_close(mean_by_row(probs, rows, 3), expected)


def experts_of(model: Any) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if is_experts_module(m)}


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("mixtral", "softmax"),
        ("qwen2_moe", "softmax"),
        ("gpt_oss", "softmax"),
        ("deepseek_v2", "softmax"),
        ("deepseek_v3", "sigmoid"),
        ("minimax_m2", "sigmoid"),
        ("gemma4_text", "given"),
    ],
)
def test_the_probe_finds_every_familys_gates(family: str, rule: str) -> None:
    model = tiny_model(family)
    model.set_experts_implementation("fmoe")
    experts = experts_of(model)
    gates = probe_gates(model, experts, EXPERTS)
    assert gates.rule.name == rule
    assert gates.top_k == TOP_K
    assert len(gates.routers) == len(experts)
    assert None not in gates.routers


class Spy:
    """Keeps each layer's gate and chosen experts; the experts contribute nothing."""

    def __init__(self, tap: RouterTap) -> None:
        self.tap = tap
        self.gates: list[Any] = []
        self.chosen: list[torch.Tensor] = []

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        self.gates.append(self.tap.take())
        self.chosen.append(index_TK)
        return torch.zeros_like(hidden_TH)


@torch.inference_mode()
def test_the_speculative_gate_is_the_next_router_on_this_layers_router_input() -> None:
    model = tiny_model("mixtral")
    model.set_experts_implementation("fmoe")
    tap = RouterTap(model)
    spy = Spy(tap)
    bind_experts(experts_of(model).values(), spy)
    model(input_ids=torch.arange(20)[None] % VOCAB)
    for (_, args, output), following in zip(spy.gates, spy.gates[1:], strict=False):
        next_router = following[0]
        expected = functional.linear(args[0], next_router.weight)
        assert torch.equal(tap.speculate(next_router, args), expected)
        assert not torch.equal(expected, output)
    assert tap.take() is None  # speculating looks like no router's run


@torch.inference_mode()
def test_the_distribution_orders_experts_as_the_model_chose_them() -> None:
    model = tiny_model("mixtral")
    model.set_experts_implementation("fmoe")
    spy = Spy(RouterTap(model))
    bind_experts(experts_of(model).values(), spy)
    model(input_ids=torch.arange(20)[None] % VOCAB)
    for (_, _, output), index in zip(spy.gates, spy.chosen, strict=True):
        probs = GateRule(name="softmax").distribution(output)
        assert torch.equal(probs.topk(TOP_K).indices.sort(1).values, index.sort(1).values)
