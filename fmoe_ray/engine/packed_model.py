"""The unmodified transformers model run on packed steps: rows of any length, one forward pass."""

from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ray.engine.attention import bind_attention
from fmoe_ray.engine.kv_cache import KVCache
from fmoe_ray.engine.messages import Row
from fmoe_ray.errors import UnsupportedModelError


class PackedModel:
    """A model with its KV slots. One step at a time."""

    def __init__(
        self, model: Any, *, num_slots: int, max_context: int, device: torch.device
    ) -> None:
        self.model = model
        self._device = device
        self._max_context = max_context
        self._cache = KVCache(num_slots, max_context)
        self._embed = model.get_input_embeddings()
        bind_attention(model, self._cache)

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all slots; known after `warm_up`."""
        return self._cache.num_bytes

    def token_ids(self, rows: Sequence[Row]) -> torch.Tensor:
        """int64 [T]: the rows' tokens one after the other."""
        return torch.tensor([token for row in rows for token in row.tokens], device=self._device)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T, H]: what the model's own embedding layer puts out."""
        embeddings: torch.Tensor = self._embed(tokens_T)
        return embeddings

    def forward(self, rows: Sequence[Row], tokens_T: torch.Tensor) -> torch.Tensor:
        """[R, V]: the logits after each row's last token; stores the rows' keys and values."""
        positions_T = self._cache.begin_step(rows, self._device)
        last_R = torch.tensor(
            [span.begin + span.num_tokens - 1 for span in self._cache.spans], device=self._device
        )
        output = self.model(
            input_ids=tokens_T[None],
            position_ids=positions_T[None],
            cache=self._cache,
            use_cache=True,
            logits_to_keep=last_R,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def warm_up(self) -> None:
        """A prompt and one token in slot 0: allocates the KV regions and finds out how each layer
        reads them. The experts contribute whatever backend is bound.

        Raises UnsupportedModelError if the model cannot run packed, CapacityError.
        """
        prompt = list(range(min(3, self._max_context - 1)))
        for start, tokens in ((0, prompt), (len(prompt), [len(prompt)])):
            row = Row(request_id=0, slot=0, start=start, tokens=tokens, samples=False)
            try:
                with torch.inference_mode():
                    logits = self.forward([row], self.token_ids([row]))
            except (AttributeError, TypeError) as error:  # a cache of its own kind
                raise UnsupportedModelError(
                    f"{self.model.config.model_type}: cannot run with batched KV slots "
                    f"({type(error).__name__}: {error}); docs/families.md lists what can"
                ) from error
            if len(logits) != 1:
                raise UnsupportedModelError(
                    f"{self.model.config.model_type}: ignores which logits to keep"
                )
