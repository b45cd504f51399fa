import pytest
import torch

from fmoe_ray.kernels.routing import publish, sort_pairs, topk


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (128, 8), (7, 7)])
def test_topk_equals_a_stable_sort(experts: int, k: int, dtype: torch.dtype, device: str) -> None:
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


@pytest.mark.parametrize("rule", ["softmax", "sigmoid", "sqrtsoftplus", "given", "none"])
def test_publish_shows_choice_and_distribution_of_the_rows_that_count(
    rule: str, device: str
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 6, device=device)
    ids = scores.topk(2).indices
    live = torch.tensor([3], dtype=torch.int32, device=device)
    chosen = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    probs = torch.full((4, 6), -1.0, device=device)
    given = None if rule == "none" else scores
    shown = publish(ids, given, rule, live, 6, chosen.data_ptr(), probs.data_ptr())
    expected_ids = ids.int()
    expected_ids[3] = 6
    assert torch.equal(shown, expected_ids)
    assert torch.equal(chosen, expected_ids)
    if rule == "none":
        expected = torch.zeros(4, 6, device=device).scatter_(1, ids, 0.5)
    else:
        raw = {
            "softmax": scores.exp(),
            "sigmoid": scores.sigmoid(),
            "sqrtsoftplus": torch.nn.functional.softplus(scores).sqrt(),
            "given": scores.clamp_min(0),
        }[rule]
        expected = raw / raw.sum(-1, keepdim=True)
    torch.testing.assert_close(probs[:3], expected[:3], rtol=1e-5, atol=1e-6)
