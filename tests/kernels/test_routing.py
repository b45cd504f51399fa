import pytest
import torch

from fmoe_ray.kernels.routing import sort_pairs, topk


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (128, 8), (7, 7)])
def test_topk_equals_a_stable_sort(
    experts: int, k: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, experts, device=device).to(dtype)
    scores[1] = scores[1].round()  # ties
    scores[2, 1:] = float("-inf")
    values, indices = topk(scores, k)
    ordered = torch.sort(scores.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(indices, ordered.indices[:, :k])
    assert torch.equal(values.float(), ordered.values[:, :k])


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 4, 60), (16, 4, 60), (50, 8, 128)])
def test_sort_pairs_lists_each_experts_pairs_in_order(
    tokens: int, k: int, experts: int, device: str
) -> None:
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(experts + 1)[:k] for _ in range(tokens)]).to(device)
    order, starts = sort_pairs(ids, experts)
    expected = torch.sort(ids.flatten(), stable=True)
    assert torch.equal(order.long(), expected.indices)
    counts = torch.bincount(ids.flatten(), minlength=experts + 1)[:experts]
    assert torch.equal(starts.diff().long(), counts)
