"""One semantic embedding per row from the embeddings of its tokens (paper 4.2).

Shape letters: T tokens of the step, R rows, H hidden size.
"""

from typing import Literal

import torch

Pooling = Literal["mean", "last", "max"]


def pool_rows(
    embeddings_TH: torch.Tensor, tokens_of_row_R: list[int], pooling: Pooling
) -> torch.Tensor:
    """float32 [R, H]. A row of one token is that token's embedding, whatever the pooling."""
    embeddings_TH = embeddings_TH.float()
    if len(tokens_of_row_R) == len(embeddings_TH):
        return embeddings_TH
    rows = embeddings_TH.split_with_sizes(tokens_of_row_R)
    if pooling == "mean":
        return torch.stack([row.mean(0) for row in rows])
    if pooling == "max":
        return torch.stack([row.amax(0) for row in rows])
    return torch.stack([row[-1] for row in rows])
