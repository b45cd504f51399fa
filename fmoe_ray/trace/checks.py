"""What makes a routing trace well-formed, field by field. Knows no file.

Shapes: T tokens, L MoE layers, J experts per layer, K chosen, S sequences, h embedding size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fmoe_ray.errors import TraceError

Array = npt.NDArray[Any]


def at(name: str, index: Sequence[int] | npt.NDArray[np.int64], value: object) -> str:
    """`expert_ids[12, 3, 1] is 40`"""
    return f"{name}[{', '.join(str(int(i)) for i in index)}] is {value}"


def require_all(name: str, array: Array, is_good: npt.NDArray[np.bool_], law: str) -> None:
    """Raises TraceError with the first entry that breaks the law."""
    if not is_good.all():
        index = np.argwhere(~is_good)[0]
        raise TraceError(f"{at(name, index, array[tuple(index)])}; {law}")


def require_shape(name: str, array: Array, letters: str, extents: Mapping[str, int]) -> None:
    """`letters` such as "TLK"; one without an extent admits any."""
    wanted = [extents.get(letter, have) for letter, have in zip(letters, array.shape, strict=False)]
    if array.ndim != len(letters) or list(array.shape) != wanted:
        known = ", ".join(f"{letter}={extents[letter]}" for letter in letters if letter in extents)
        raise TraceError(
            f"{name} has shape {list(array.shape)}; [{', '.join(letters)}] is needed"
            + (f" with {known}" if known else "")
        )


def as_scalar(name: str, value: object) -> int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise TraceError(f"{name} is {value!r}; one integer is needed")
    return int(array.reshape(()))


def as_integers(name: str, array: Array, dtype: npt.DTypeLike) -> Array:
    """Contiguous, as `dtype`; a value that does not fit is an error."""
    if array.dtype.kind not in "iu":
        raise TraceError(f"{name} has dtype {array.dtype}; integers are needed")
    limits = np.iinfo(np.dtype(dtype))
    if not np.can_cast(array.dtype, dtype):
        law = f"{np.dtype(dtype)} holds {limits.min} to {limits.max}"
        require_all(name, array, (array >= limits.min) & (array <= limits.max), law)
    return np.ascontiguousarray(array, dtype=dtype)


def as_floats(name: str, array: Array) -> Array:
    """Contiguous; float16 stays, all other real types become float32."""
    if array.dtype.kind != "f":
        raise TraceError(f"{name} has dtype {array.dtype}; float16 or float32 is needed")
    return np.ascontiguousarray(array, dtype=np.float16 if array.itemsize == 2 else np.float32)


def as_finite(name: str, array: Array) -> Array:
    values = as_floats(name, array)
    require_all(name, values, np.isfinite(values), "finite numbers are needed")
    return values


def as_seconds(name: str, array: Array) -> Array:
    if array.dtype.kind not in "iuf":
        raise TraceError(f"{name} has dtype {array.dtype}; numbers are needed")
    seconds = np.ascontiguousarray(array, dtype=np.float64)
    require_all(name, seconds, np.isfinite(seconds), "finite numbers are needed")
    return seconds


def as_weights(name: str, array: Array) -> Array:
    """Finite and at least 0; they need not sum to 1."""
    weights = as_floats(name, array)
    is_good = (weights >= 0) & np.isfinite(weights)
    require_all(name, weights, is_good, "a weight is finite and at least 0")
    return weights


def as_expert_ids(array: Array, num_experts: int) -> Array:
    """u8 where all ids fit, else u16: within 0 .. J-1, a token's K ids all different."""
    if array.dtype.kind not in "iu":
        raise TraceError(f"expert_ids has dtype {array.dtype}; integers are needed")
    require_all(
        "expert_ids",
        array,
        (array >= 0) & (array < num_experts),
        f"num_experts is {num_experts}",
    )
    ordered = np.sort(array, axis=-1)
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if is_repeated.any():
        index = np.argwhere(is_repeated)[0]
        chosen = array[tuple(index)].tolist()
        raise TraceError(f"{at('expert_ids', index, chosen)}; a token chooses an expert once")
    return np.ascontiguousarray(array, dtype=np.uint8 if num_experts <= 256 else np.uint16)


def check_sequences(
    seq_start: npt.NDArray[np.int64], seq_len: npt.NDArray[np.int64], num_tokens: int
) -> None:
    """In any order, each within the trace and at least 1 token long, none overlapping another."""
    in_trace = f"the trace has {num_tokens} tokens"
    require_all("seq_start", seq_start, (seq_start >= 0) & (seq_start < num_tokens), in_trace)
    require_all("seq_len", seq_len, seq_len >= 1, "a sequence has at least 1 token")
    require_all(
        "seq_len",
        seq_len,
        seq_len <= num_tokens - seq_start,
        f"with its seq_start it ends outside the trace: {in_trace}",
    )
    order = np.argsort(seq_start, kind="stable")
    ends = (seq_start + seq_len)[order]
    clashes = np.flatnonzero(ends[:-1] > seq_start[order][1:])
    if clashes.size:
        first, second = order[clashes[0]], order[clashes[0] + 1]
        raise TraceError(
            f"{at('seq_start', [second], seq_start[second])}, inside sequence {first}, which is "
            f"tokens {seq_start[first]} to {ends[clashes[0]] - 1}; sequences do not overlap"
        )
