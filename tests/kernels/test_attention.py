import pytest
import torch

from fmoe_ray.kernels.attention import decode_attention


@pytest.mark.parametrize(("q_heads", "k_heads", "d", "v"), [(4, 4, 16, 16), (8, 2, 24, 16)])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks"])
def test_decode_attention_equals_softmax_over_the_rows_history(
    q_heads: int, k_heads: int, d: int, v: int, kind: str, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    context = 400
    lengths = [1, 130, 260]  # keys after this step
    k_store = torch.randn(4, k_heads, context, d, device=device).to(dtype)
    v_store = torch.randn(4, k_heads, context, v, device=device).to(dtype)
    slots = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    q = torch.randn(3, q_heads, d, device=device).to(dtype)
    k_new = torch.randn(3, k_heads, d, device=device).to(dtype)
    v_new = torch.randn(3, k_heads, v, device=device).to(dtype)
    window = 150 if kind == "window" else 0
    softcap = 2.0 if kind == "softcap" else 0.0
    sinks = torch.randn(q_heads, device=device).to(dtype) if kind == "sinks" else None
    results = []
    for bucket in (260, 400):
        stores = k_store.clone(), v_store.clone()
        results.append(
            decode_attention(
                q, k_new, v_new, *stores, slots, positions, bucket, 0.3, window, softcap, sinks
            )
        )
    assert torch.equal(*results), "the bucket must not change a bit"
    for row, length in enumerate(lengths):
        slot = int(slots[row])
        assert torch.equal(stores[0][slot, :, length - 1], k_new[row])
        assert torch.equal(stores[1][slot, :, length - 1], v_new[row])
        begin = max(0, length - window) if window else 0
        keys = stores[0][slot, :, begin:length].transpose(0, 1).double()
        values = stores[1][slot, :, begin:length].transpose(0, 1).double()
        keys = keys.repeat_interleave(q_heads // k_heads, 1)
        values = values.repeat_interleave(q_heads // k_heads, 1)
        scores = torch.einsum("qd,sqd->qs", q[row].double(), keys) * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        p = scores.softmax(-1)[:, : length - begin]
        expected = torch.einsum("qs,sqv->qv", p, values)
        error = (results[0][row].double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
