"""A torch.compile backend for decode steps: our kernels for linear layers and top-k, inductor's
fusion for everything between. It knows operations, not model families.

Nothing is tuned by timing, so that every run of a shape takes the same kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fmoe_ray.kernels import ops

_MAX_ROWS = 64
_MAX_WEIGHTS = 4
_SHAPE_ONLY = ("view", "reshape", "contiguous", "flatten", "unsqueeze", "squeeze")


def _value(node: object) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _linear_args(node: Node) -> tuple[Node, Node, Node | None]:
    names = ("input", "weight", "bias")
    args = dict(zip(names, node.args, strict=False)) | node.kwargs
    return args["input"], args["weight"], args.get("bias")  # type: ignore[return-value]


def _is_our_linear(node: Node) -> bool:
    if node.op != "call_function" or node.target is not F.linear:
        return False
    x, weight, bias = (_value(arg) for arg in _linear_args(node))
    return (
        isinstance(x, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and 0 < x.numel() // x.shape[-1] <= _MAX_ROWS
        and weight.dim() == 2
        and weight.is_contiguous()
        and x.dtype == weight.dtype
        and (bias is None or bias.dtype == x.dtype)
    )


def _source(node: Node) -> Node:
    """The node whose values `node` holds in another shape with the same last dimension."""
    last = _value(node).shape[-1]
    while node.op == "call_method" and node.target in _SHAPE_ONLY:
        before = node.args[0]
        value = _value(before)
        if not isinstance(before, Node) or value is None or value.shape[-1] != last:
            break
        node = before
    return node


def _groups(graph: torch.fx.Graph) -> list[list[Node]]:
    """Linear layers that read the same values and agree on having a bias, in order."""
    groups: dict[tuple[Node, bool], list[list[Node]]] = {}
    for node in graph.nodes:
        if not _is_our_linear(node):
            continue
        x, _, bias = _linear_args(node)
        lists = groups.setdefault((_source(x), bias is not None), [[]])
        if len(lists[-1]) == _MAX_WEIGHTS:
            lists.append([])
        lists[-1].append(node)
    return [group for lists in groups.values() for group in lists]


def _join_linears(graph: torch.fx.Graph) -> None:
    for group in _groups(graph):
        first = group[0]
        x = _linear_args(first)[0]
        parts = [_linear_args(node)[1:] for node in group]
        weights = [weight for weight, _ in parts]
        biases = [bias for _, bias in parts if bias is not None]
        if any(w.op not in ("placeholder", "get_attr") for w in [*weights, *biases]):
            continue
        with graph.inserting_before(first):
            joined = graph.call_function(torch.ops.fmoe.linears.default, (x, weights, biases))
            begin = 0
            pieces = []
            for node, weight in zip(group, weights, strict=True):
                size = _value(weight).shape[0]
                piece = graph.call_function(torch.narrow, (joined, -1, begin, size))
                shape = tuple(_value(node).shape)
                pieces.append(graph.call_method("reshape", (piece, shape)))
                begin += size
        for node, piece in zip(group, pieces, strict=True):
            piece.meta["example_value"] = _value(node)
            node.replace_all_uses_with(piece)
            graph.erase_node(node)


def _replace_topk(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        is_function = node.op == "call_function" and node.target is torch.topk
        is_method = node.op == "call_method" and node.target == "topk"
        if not (is_function or is_method):
            continue
        names = ("input", "k", "dim", "largest", "sorted")
        args = dict(zip(names, node.args, strict=False)) | node.kwargs
        scores = _value(args["input"])
        if (
            not isinstance(scores, torch.Tensor)
            or not isinstance(args["k"], int)
            or args.get("dim", -1) not in (-1, scores.dim() - 1)
            or not args.get("largest", True)
            or scores.shape[-1] > 1024
        ):
            continue
        with graph.inserting_before(node):
            ours = graph.call_function(torch.ops.fmoe.topk.default, (args["input"], args["k"]))
        node.replace_all_uses_with(ours)
        graph.erase_node(node)


def rewrite(module: GraphModule) -> GraphModule:
    """Replaces linear layers and top-k by our operators, in place."""
    _join_linears(module.graph)
    _replace_topk(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """`torch.compile(..., backend=fuse.backend)`."""
    from torch._inductor.compile_fx import compile_fx

    assert ops  # the operators are registered by importing them
    patches = {
        "triton.autotune_pointwise": False,
        "max_autotune": False,
        "coordinate_descent_tuning": False,
        "emulate_precision_casts": True,
        "triton.cudagraphs": False,
    }
    compiled: Any = compile_fx(rewrite(module), example_inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]
