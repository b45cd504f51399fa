"""The bytes of one expert: its parameters one after the other in one blob, so one copy moves it."""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 64
"""Bytes: a cache line, and enough for any vectorised kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One parameter of an expert; `offset` is bytes from the start of the blob."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobLayout:
    """Where each parameter of an expert lies in its blob; the same for all experts of a model."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, parameters: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> "BlobLayout":
        """Packs the parameters in the given order, each on a 64-byte boundary."""
        fields = []
        offset = 0
        for name, (dtype, shape) in parameters.items():
            field = Field(name=name, dtype=dtype, shape=shape, offset=offset)
            fields.append(field)
            offset += -(-field.num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(fields=tuple(fields))

    @property
    def blob_bytes(self) -> int:
        last = self.fields[-1]
        return last.offset + -(-last.num_bytes // ALIGNMENT) * ALIGNMENT

    def views(self, blob: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed tensors over `blob`, uint8 [blob_bytes]; nothing is copied."""
        return {
            field.name: blob[field.offset : field.offset + field.num_bytes]
            .view(field.dtype)
            .view(field.shape)
            for field in self.fields
        }

    def numpy_views(self, blob: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """As `views`, over a writable numpy array of the same bytes."""
        return self.views(torch.from_numpy(blob))

    def describe(self) -> str:
        """Equal exactly for layouts whose blobs can be exchanged."""
        return ";".join(f"{f.name}:{f.dtype}:{f.shape}@{f.offset}" for f in self.fields)
