"""A loaded model that computes without an engine, its experts straight from the host store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fmoe_ray.evaluate.tiny_models import VOCAB
from fmoe_ray.models.experts import Dispatch
from fmoe_ray.models.loader import LoadedModel, load_model


class StoredExperts:
    """Experts backend; the weights are copied out of the store."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._views = [
            loaded.layout.numpy_views(loaded.store.blob(index).copy())
            for index in range(loaded.store.num_blobs)
        ]
        self._num_experts = loaded.num_experts

    def weights(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        return self._views[layer * self._num_experts + expert]

    def forward(
        self,
        module: Any,
        layer: int,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        dispatch = Dispatch(hidden_TH, index_TK, self._num_experts)
        for expert in dispatch.experts:
            dispatch.compute(module, expert, self.weights(layer, expert))
        return dispatch.combine(weights_TK)


@contextmanager
def loading(folder: Path, dtype: torch.dtype | None = torch.float32) -> Iterator[LoadedModel]:
    """The model on the CPU; its store is closed afterwards."""
    loaded = load_model(str(folder), device=torch.device("cpu"), dtype=dtype)
    try:
        yield loaded
    finally:
        loaded.store.close()


def logits(model: Any) -> torch.Tensor:
    """[2, 24, VOCAB] of fixed random tokens."""
    tokens = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return output
