import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fmoe_ray.evaluate.tiny_models import EXPERTS, HIDDEN, tiny_model
from fmoe_ray.models.architecture import is_experts_module, layout_of
from fmoe_ray.models.experts import Dispatch

KINDS = ["mixtral", "gpt_oss", "aria_text", "deepseek_v3"]
"""Concatenated; transposed, interleaved, with bias and clamps; transposed; float32 weights."""


def experts_module(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return next(m for m in tiny_model(family, dtype).modules() if is_experts_module(m))


def weights_of(module: Any) -> list[dict[str, torch.Tensor]]:
    names = [field.name for field in layout_of(module).fields]
    return [{name: getattr(module, name)[e] for name in names} for e in range(EXPERTS)]


def routing(num_tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(num_tokens, HIDDEN, generator=generator)
    index_TK = torch.rand(num_tokens, EXPERTS, generator=generator).topk(top_k).indices
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    return hidden_TH, index_TK, weights_TK


def dispatch_in(
    order: list[int], module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    dispatch = Dispatch(hidden, index, EXPERTS)
    for expert in sorted(dispatch.experts, key=order.index):
        dispatch.compute(module, expert, weights_of(module)[expert])
    return dispatch.combine(weights)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With more, grouped_mm itself adds in another order for float32."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_every_kind_of_expert_equals_grouped_mm_bit_by_bit(family: str, dtype: torch.dtype) -> None:
    module = experts_module(family, dtype)
    hidden, index, weights = routing(num_tokens=9, top_k=4, seed=1)
    hidden = hidden.to(dtype)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, index, weights)
    ours = dispatch_in(list(range(EXPERTS)), module, hidden, index, weights)
    assert torch.equal(ours, expected)


_MODULE = experts_module("mixtral")


@given(st.permutations(range(EXPERTS)), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
@torch.inference_mode()
def test_the_order_of_arrival_does_not_change_a_bit(
    order: list[int], num_tokens: int, top_k: int, seed: int
) -> None:
    hidden, index, weights = routing(num_tokens, top_k, seed)
    ascending = dispatch_in(list(range(EXPERTS)), _MODULE, hidden, index, weights)
    assert torch.equal(dispatch_in(order, _MODULE, hidden, index, weights), ascending)


@torch.inference_mode()
def test_ids_beyond_the_experts_contribute_nothing() -> None:
    hidden, index, weights = routing(num_tokens=6, top_k=3, seed=2)
    beyond = random.Random(0).choices([True, False], k=6)
    index[beyond, 1] = EXPERTS
    without = weights.clone()
    without[beyond, 1] = 0.0
    order = list(range(EXPERTS))
    ours = dispatch_in(order, _MODULE, hidden, index, weights)
    index[beyond, 1] = 0
    torch.testing.assert_close(ours, dispatch_in(order, _MODULE, hidden, index, without))


@torch.inference_mode()
def test_tokens_without_any_expert_get_zeros() -> None:
    hidden, index, weights = routing(num_tokens=3, top_k=2, seed=3)
    dispatch = Dispatch(hidden, torch.full_like(index, EXPERTS), EXPERTS)
    assert dispatch.experts == []
    assert torch.equal(dispatch.combine(weights), torch.zeros_like(hidden))


def test_combining_before_every_expert_was_computed_is_a_bug() -> None:
    hidden, index, weights = routing(num_tokens=3, top_k=2, seed=4)
    with pytest.raises(AssertionError, match="were not computed"):
        Dispatch(hidden, index, EXPERTS).combine(weights)
