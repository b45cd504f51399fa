from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fmoe_ray.kernels import fuse


class Block(nn.Module):
    """Four linear layers on one input, one of them on another shape of it, one with a bias; one on
    another input; a router."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.gate = (nn.Linear(8, n, bias=False) for n in (8, 4, 6))
        self.biased = nn.Linear(8, 5)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = x.view(-1, 8)
        values, ids = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1)
        return self.out(self.q(x).sigmoid()), self.k(x), self.biased(x), values, ids


def run(block: Block, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    """What the rewritten block computes, and the operators of ours in it."""
    seen: list[str] = []

    def backend(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
        fuse.rewrite(module)
        seen.extend(str(n.target) for n in module.graph.nodes if "fmoe" in str(n.target))
        assert not any(n.target is nn.functional.linear for n in module.graph.nodes)
        forward: Callable[..., Any] = module.forward
        return forward

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(block, backend=backend, dynamic=False, fullgraph=True)
        return compiled(x), seen


def test_layers_on_one_input_become_one_operator_and_compute_the_same() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(1, 3, 8)
    got, seen = run(block, x)
    # q, k and gate together; biased; out; the router's top-k.
    assert sorted(seen) == ["fmoe.linears.default"] * 3 + ["fmoe.topk.default"]
    for ours, theirs in zip(got, block(x), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_steps_of_many_rows_keep_the_librarys_own_products() -> None:
    block = Block()
    linear = torch.randn(1, 65, 8)
    seen: list[int] = []

    def backend(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
        fuse.rewrite(module)
        seen.append(sum(n.target is nn.functional.linear for n in module.graph.nodes))
        forward: Callable[..., Any] = module.forward
        return forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(block, backend=backend, dynamic=False, fullgraph=True)(linear)
    assert seen == [5]
