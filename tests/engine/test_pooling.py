import torch

from fmoe_ray.engine.pooling import pool_rows

EMBEDDINGS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
ROWS = [3, 1, 2]


def test_mean_last_and_max_are_taken_within_each_row() -> None:
    parts = EMBEDDINGS[:3], EMBEDDINGS[3:4], EMBEDDINGS[4:]
    assert torch.equal(pool_rows(EMBEDDINGS, ROWS, "mean"), torch.stack([p.mean(0) for p in parts]))
    assert torch.equal(pool_rows(EMBEDDINGS, ROWS, "last"), torch.stack([p[-1] for p in parts]))
    assert torch.equal(pool_rows(EMBEDDINGS, ROWS, "max"), torch.stack([p.amax(0) for p in parts]))


def test_one_token_a_row_is_its_own_embedding_in_float32() -> None:
    embeddings = EMBEDDINGS.bfloat16()
    assert torch.equal(pool_rows(embeddings, [1] * 6, "mean"), embeddings.float())
