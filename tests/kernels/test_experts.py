from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe_ray.kernels.experts import ACTIVATIONS, ExpertLayout, experts

H, I, J, SLOTS = 48, 40, 6, 9  # noqa: E741


def layout(**kind: object) -> ExpertLayout:
    rows = 2 * I if kind.get("has_gate", True) else I
    gate_up, down = rows * H, H * I
    sizes = {"gate_up": 0, "down": gate_up, "stride": 8192}
    if kind.pop("is_biased", False):
        sizes |= {"gate_up_bias": gate_up + down, "down_bias": gate_up + down + rows}
    return ExpertLayout(hidden=H, inner=I, **sizes, **kind)  # type: ignore[arg-type]


def one_expert(x: Tensor, blob: Tensor, at: ExpertLayout) -> Tensor:
    """The plain reference, with the library's own operations and roundings."""
    rows = 2 * I if at.has_gate else I
    w1 = blob[at.gate_up : at.gate_up + rows * H]
    w2 = blob[at.down : at.down + H * I]
    if at.is_transposed:
        h, w2 = x @ w1.view(H, rows), w2.view(I, H)
    else:
        h, w2 = F.linear(x, w1.view(rows, H)), w2.view(H, I).T
    if at.gate_up_bias >= 0:
        h = h + blob[at.gate_up_bias : at.gate_up_bias + rows]
    if not at.has_gate:
        gate, up = h, torch.ones_like(h)
    elif at.is_interleaved:
        gate, up = h[..., ::2], h[..., 1::2]
    else:
        gate, up = h.chunk(2, -1)
    if at.activation == "clamp_swiglu":
        gate = gate.clamp(max=at.limit)
        up = up.clamp(-at.limit, at.limit)
        h = (up + 1) * (gate * torch.sigmoid(gate * at.alpha))
    else:
        h = REFERENCE[at.activation](gate) * up
    y = h @ w2
    return y if at.down_bias < 0 else y + blob[at.down_bias : at.down_bias + H]


REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
KINDS = [
    layout(),
    layout(activation="gelu"),
    layout(activation="gelu_tanh", is_biased=True),
    layout(activation="clamp_swiglu", is_transposed=True, is_interleaved=True, is_biased=True),
    layout(activation="relu"),
    layout(activation="relu", has_gate=False, is_biased=True),
    layout(activation="relu2", has_gate=False),
    layout(activation="relu2", is_transposed=True),
    layout(activation="silu", has_gate=False, is_transposed=True, is_biased=True),
]


def name_of(at: ExpertLayout) -> str:
    kinds = {
        "no-gate": not at.has_gate,
        "biased": at.down_bias >= 0,
        "transposed": at.is_transposed,
    }
    return "-".join([at.activation, *(kind for kind, is_so in kinds.items() if is_so)])


def test_every_activation_is_compared() -> None:
    assert {at.activation for at in KINDS} == set(ACTIVATIONS)


@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
@pytest.mark.parametrize("at", KINDS, ids=name_of)
def test_experts_equal_the_reference_wherever_they_lie(
    tokens: int, at: ExpertLayout, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    k = 3
    arena = torch.randn(SLOTS * at.stride, device=device).to(dtype) / 4
    table = torch.randperm(SLOTS)[:J].to(device, torch.int32)
    x = torch.randn(tokens, H, device=device).to(dtype)
    ids = torch.stack([torch.randperm(J)[:k] for _ in range(tokens)]).to(device)
    weights = torch.rand(tokens, k, device=device)
    out = torch.full((tokens, k, H), float("nan"), dtype=torch.float32, device=device)
    experts(x, ids, weights, table, arena, at, out)
    for token in range(tokens):
        for pick in range(k):
            slot = int(table[ids[token, pick]])
            blob = arena[slot * at.stride : (slot + 1) * at.stride]
            expected = one_expert(x[token].double(), blob.double(), at) * weights[token, pick]
            error = (out[token, pick].double() - expected).norm() / expected.norm()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("tokens", [1, 5])
def test_waves_equal_one_call_bit_for_bit(tokens: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    at = layout()
    arena = torch.randn(SLOTS * at.stride, device=device).to(dtype) / 4
    table = torch.randperm(SLOTS)[:J].to(device, torch.int32)
    x = torch.randn(tokens, H, device=device).to(dtype)
    ids = torch.stack([torch.randperm(J)[:3] for _ in range(tokens)]).to(device)
    weights = torch.rand(tokens, 3, device=device)
    whole = torch.full((tokens, 3, H), float("nan"), device=device)
    experts(x, ids, weights, table, arena, at, whole)
    waves = torch.full_like(whole, float("nan"))
    for wave in ([0, 3], [5], [1, 2, 4]):
        resident = torch.full_like(table, -1)
        resident[wave] = table[wave]
        experts(x, ids, weights, resident, arena, at, waves)
    assert torch.equal(whole, waves)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_pair_without_expert_counts_nothing(tokens: int, device: str) -> None:
    at = layout()
    arena = torch.randn(SLOTS * at.stride, device=device)
    table = torch.arange(J, dtype=torch.int32, device=device)
    ids = torch.full((tokens, 2), J, device=device)
    out = torch.zeros(tokens, 2, H, device=device)
    x = torch.randn(tokens, H, device=device)
    experts(x, ids, torch.ones(tokens, 2, device=device), table, arena, at, out)
    assert not out.any()
