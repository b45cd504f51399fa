"""Keys and values of all requests in flight: one region per layer, one slot per request.

Handed to the unmodified model as its `cache`. Requests of different lengths share a step; nothing
is padded. Knows neither experts nor sampling.

Shape letters: S slots, A heads of the cached tensor, M positions of a slot, D head size,
T tokens of the step, packed row after row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from fmoe_ray.engine.messages import Row
from fmoe_ray.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a step: its `num_tokens` at `begin` in the packed step, `length` in its slot."""

    slot: int
    begin: int
    num_tokens: int
    length: int

    @property
    def is_fresh(self) -> bool:
        """A prompt, or its first part: its queries are all of its keys, and more than one."""
        return self.num_tokens == self.length and self.num_tokens > 1


class KVCache:
    """A duck-typed transformers cache. One step at a time: `begin_step`, then the forward pass.

    A layer's region takes its shape from the first update, so a family that caches latents (MLA)
    needs nothing special. Families that attend to exactly what `update` returns are read in place;
    the others (MLA expands it first) get every row's whole history, packed. The first step finds
    out which is which.
    """

    is_compileable = False  # transformers asks

    def __init__(self, num_slots: int, max_context: int) -> None:
        self._num_slots = num_slots
        self._max_context = max_context
        self._regions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        """The same regions, slot by slot: [1, A, M, D] each."""
        self._in_place: set[int] = set()
        self._returned: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._slot_T = torch.empty(0, dtype=torch.long)
        self._position_T = torch.empty(0, dtype=torch.long)
        self._masks: dict[tuple[Span, int | None], torch.Tensor] = {}
        self.spans: list[Span] = []

    @property
    def max_context(self) -> int:
        return self._max_context

    def is_read_in_place(self) -> bool:
        """Every layer attends to exactly what it stored; known after the first step."""
        return self._in_place == set(self._regions)

    def regions(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all slots, [S, A, M, D] each."""
        return self._regions[layer_idx]

    @property
    def num_bytes(self) -> int:
        """Of all regions; known after the first step."""
        return sum(region.nbytes for regions in self._regions.values() for region in regions)

    def begin_step(self, rows: Sequence[Row], device: torch.device) -> torch.Tensor:
        """Where this step's tokens go; returns their positions, int64 [T]."""
        self.spans = []
        slots: list[int] = []
        positions: list[int] = []
        for row in rows:
            num_tokens = len(row.tokens)
            end = row.start + num_tokens
            assert 0 <= row.slot < self._num_slots, f"KV slot {row.slot} of {self._num_slots}"
            assert 0 < num_tokens and end <= self._max_context, (
                f"request {row.request_id}: positions {row.start} to {end} of {self._max_context}"
            )
            self.spans.append(Span(row.slot, len(slots), num_tokens, end))
            slots += [row.slot] * num_tokens
            positions += range(row.start, end)
        self._slot_T = torch.tensor(slots, device=device)
        self._position_T = torch.tensor(positions, device=device)
        self._returned.clear()
        self._masks.clear()
        return self._position_T

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the step's `key` and `value`, [1, A, T, D] each, and returns what to attend to."""
        if layer_idx not in self._regions:
            self._allocate(layer_idx, key, value)
        regions = self._regions[layer_idx]
        for region, new in zip(regions, (key, value), strict=True):
            region[self._slot_T, :, self._position_T] = new[0].transpose(0, 1)
        if layer_idx not in self._in_place:
            keys, values = zip(*self._read(layer_idx), strict=True)
            key, value = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        self._returned[id(key)] = (layer_idx, key, value)
        return key, value

    def _allocate(self, layer_idx: int, *news: torch.Tensor) -> None:
        regions = []
        for new in news:
            shape = (self._num_slots, new.shape[1], self._max_context, new.shape[3])
            try:
                regions.append(new.new_empty(shape))
            except RuntimeError as error:
                raise CapacityError(
                    f"no memory for {prod(shape) * new.itemsize} bytes of keys or values of one "
                    f"layer: lower engine.max_batch_size ({self._num_slots}) or "
                    f"engine.max_context ({self._max_context})"
                ) from error
        keys, values = regions
        self._regions[layer_idx] = (keys, values)
        self._slots[layer_idx] = (
            keys.tensor_split(self._num_slots),
            values.tensor_split(self._num_slots),
        )

    def histories(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Key and value of every row, [1, A, length, D] each, from what an attention layer got."""
        layer, returned_key, returned_value = self._returned.get(id(key), (None, None, None))
        if layer is not None and key is returned_key and value is returned_value:
            self._in_place.add(layer)
            return self._read(layer)
        lengths = [span.length for span in self.spans]
        assert key.shape[2] == sum(lengths), (
            f"attention got {key.shape[2]} keys for {sum(lengths)} positions"
        )
        keys, values = key.split_with_sizes(lengths, 2), value.split_with_sizes(lengths, 2)
        return list(zip(keys, values, strict=True))

    def _read(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys_S, values_S = self._slots[layer]
        return [
            (keys_S[s.slot].narrow(2, 0, s.length), values_S[s.slot].narrow(2, 0, s.length))
            for s in self.spans
        ]

    def mask(self, span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
        """bool [1, 1, queries, length], True where a query sees a key; None where all see all."""
        if span.num_tokens == 1 and (window is None or span.length <= window):
            return None
        if (span, window) not in self._masks:  # the same for every layer of the step
            positions = torch.arange(span.length, device=device)
            query = positions[-span.num_tokens :, None]
            seen = positions <= query
            if window is not None:
                seen &= positions > query - window
            self._masks[span, window] = seen[None, None]
        return self._masks[span, window]

    def get_seq_length(self, *_: object) -> int:
        """Part of the cache interface; positions are given to the model, so it never matters."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: object) -> tuple[int, int]:
        """Part of the cache interface; the model builds no mask for our attention."""
        return query_length, 0
