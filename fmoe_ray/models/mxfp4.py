"""Expert parameters stored in MXFP4 (OCP Microscaling Formats 1.0): codes of four bits, and one
power of two for each 32 of them. Knows no family and no file, only the two tensors of a parameter.

Shape letters: J experts, R rows (the outputs of a projection), G groups of 32 inputs in a row.
"""

from functools import cache
from typing import Any

import torch

from fmoe_ray.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
"""What a parameter's name ends with where its codes and its scales are stored."""
GROUP = 32
"""Values that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)
"""Of the codes 0 to 15: a sign, two bits of exponent, one of mantissa (E2M1)."""
_SCALE_BIAS = 127
_GROUPS_AT_ONCE = 1 << 16
"""Bounds the indices, which are four times as big as the codes, to 4 MiB."""


class PackedExperts:
    """One parameter of all J experts of a layer, dequantised expert by expert when asked.

    Stands in for safetensors' lazy slice of a fused parameter.
    """

    def __init__(
        self, name: str, blocks: Any, scales: Any, *, is_transposed: bool, dtype: torch.dtype
    ) -> None:
        """`blocks` uint8 [J, R, G, 16] and `scales` uint8 [J, R, G] are lazy slices.

        `is_transposed` says that the model keeps a weight as [inputs, outputs]. Raises
        CheckpointError for tensors of another type or shape.
        """
        for suffix, tensor in ((BLOCKS, blocks), (SCALES, scales)):
            if tensor.get_dtype() != "U8":
                raise CheckpointError(
                    f"{name}{suffix} is stored as {tensor.get_dtype()}, U8 expected for MXFP4"
                )
        shape, scales_shape = tuple(blocks.get_shape()), tuple(scales.get_shape())
        if len(shape) != 4 or shape[3] != GROUP // 2 or shape[:3] != scales_shape:
            raise CheckpointError(
                f"{name}: blocks of shape {shape} and scales of shape {scales_shape} do not belong "
                f"together, (J, R, G, {GROUP // 2}) and (J, R, G) expected for MXFP4"
            )
        self._blocks, self._scales = blocks, scales
        self._is_transposed, self._dtype = is_transposed, dtype

    def get_shape(self) -> tuple[int, ...]:
        """Of the dequantised parameter, experts first."""
        num_experts, rows, groups, _ = self._blocks.get_shape()
        columns = groups * GROUP
        return (num_experts, *((columns, rows) if self._is_transposed else (rows, columns)))

    def __getitem__(self, expert: int) -> torch.Tensor:
        """The parameter of one expert; a transposed one is a view of what was read."""
        weight = dequantise(self._blocks[expert], self._scales[expert], self._dtype)
        return weight.T if self._is_transposed else weight


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R, G * 32] of type `dtype`, from uint8 [R, G, 16] and uint8 [R, G].

    A byte holds two neighbours, the first in its low half. A value is its code times
    2**(scale - 127), rounded once to `dtype`: the bits of transformers' own
    `Mxfp4Config(dequantize=True)`. Like there, 255 is a scale as any other, not a NaN.
    """
    rows, groups, _ = blocks.shape
    table = _pairs(dtype)
    values = torch.empty(rows, groups * GROUP, dtype=dtype)
    pairs = values.view(table.dtype).view(-1, GROUP // 2)
    blocks, scales = blocks.reshape(-1, GROUP // 2), scales.reshape(-1, 1)
    for begin in range(0, rows * groups, _GROUPS_AT_ONCE):
        some = slice(begin, begin + _GROUPS_AT_ONCE)
        index = scales[some].int() * 256 + blocks[some]
        torch.index_select(table, 0, index.view(-1), out=pairs[some].view(-1))
    return values


@cache
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """Two values of `dtype` as one integer, at 256 * scale + byte: looking up is all that is left
    to do for a byte, and one reading serves both of its codes.
    """
    byte = torch.arange(256)
    code_values = torch.tensor(_VALUES, dtype=torch.float64)
    values = torch.stack([code_values[byte % 16], code_values[byte // 16]], dim=1)
    scales = torch.tensor(
        [2.0 ** (scale - _SCALE_BIAS) for scale in range(256)], dtype=torch.float64
    )
    table = (scales[:, None, None] * values).to(dtype)
    return table.view(torch.int32 if dtype.itemsize == 2 else torch.int64).view(-1)
