"""A routing trace: which experts every token chose. In memory, and as a compressed npz file.

Shapes: T tokens, L MoE layers, J experts per layer, K chosen, S sequences, h embedding size.
"""

import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fmoe_ray.errors import TraceError
from fmoe_ray.trace import checks

PREFILL, DECODE = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingTrace:
    """Checked when made: TraceError names the field, the index and the value that is wrong.

    The arrays are not copied where they already have the type given here. Sequences may lie in any
    order; tokens outside all of them are ignored.
    """

    expert_ids: npt.NDArray[Any]
    """u8 or u16 [T, L, K]; other integer types are converted."""
    weights: npt.NDArray[Any]
    """f16 or f32 [T, L, K]: gate weight of each chosen expert, not necessarily summing to 1."""
    seq_start: npt.NDArray[np.int64]
    """[S]"""
    seq_len: npt.NDArray[np.int64]
    """[S]"""
    num_experts: int
    """J"""
    token_ids: npt.NDArray[np.int32] | None = None
    """[T] input token; -1 where there is none. The same id has the same embedding."""
    probs: npt.NDArray[Any] | None = None
    """f16 or f32 [T, L, J]: the gates' full distributions."""
    spec_probs: npt.NDArray[Any] | None = None
    """f16 or f32 [T, L, J]: gate l applied to the hidden state of layer l-1."""
    phase: npt.NDArray[np.uint8] | None = None
    """[T]: 0 prefill, 1 decode; all decode where it is missing."""
    arrival_s: npt.NDArray[np.float64] | None = None
    """[S] seconds; any real type is converted."""
    embeddings: npt.NDArray[Any] | None = None
    """f16 or f32 [T, h]"""

    def __post_init__(self) -> None:
        for name, value in _checked(self).items():
            object.__setattr__(self, name, value)

    @property
    def num_tokens(self) -> int:
        return int(self.expert_ids.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.expert_ids.shape[2])

    @property
    def num_sequences(self) -> int:
        return len(self.seq_start)

    def sequences(self) -> list[tuple[int, int]]:
        """(start, length) of each, in the trace's order."""
        return list(zip(self.seq_start.tolist(), self.seq_len.tolist(), strict=True))

    def split(self, fraction: float) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The first int(fraction * S) sequences to learn from, and the others.

        Raises TraceError where no sequence is left to measure.
        """
        num_learned = int(fraction * self.num_sequences)
        if not 0 <= num_learned < self.num_sequences:
            raise TraceError(
                f"split {fraction:g} of {self.num_sequences} sequences leaves none to measure"
            )
        every = self.sequences()
        return every[:num_learned], every[num_learned:]

    def select(self, sequences: Iterable[int]) -> "RoutingTrace":
        """A trace of these sequences alone, by index and in this order, tokens packed."""
        chosen = np.fromiter(sequences, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.num_sequences)]
        if outside.size:
            raise TraceError(f"no sequence {outside[0]}; the trace has {self.num_sequences}")
        lengths = self.seq_len[chosen]
        starts = np.cumsum(lengths) - lengths
        tokens = np.repeat(self.seq_start[chosen] - starts, lengths) + np.arange(lengths.sum())
        return replace(
            self,
            expert_ids=self.expert_ids[tokens],
            weights=self.weights[tokens],
            seq_start=starts,
            seq_len=lengths,
            token_ids=_taken(self.token_ids, tokens),
            probs=_taken(self.probs, tokens),
            spec_probs=_taken(self.spec_probs, tokens),
            phase=_taken(self.phase, tokens),
            arrival_s=_taken(self.arrival_s, chosen),
            embeddings=_taken(self.embeddings, tokens),
        )


def _taken(part: npt.NDArray[Any] | None, index: npt.NDArray[np.int64]) -> Any:
    return None if part is None else part[index]


_FIELDS = [field.name for field in fields(RoutingTrace)]
_REQUIRED = ["expert_ids", "weights", "seq_start", "seq_len", "num_experts"]
_ARRAYS: dict[str, tuple[str, Callable[[str, npt.NDArray[Any]], npt.NDArray[Any]]]] = {
    "weights": ("TLK", checks.as_weights),
    "seq_start": ("S", partial(checks.as_integers, dtype=np.int64)),
    "seq_len": ("S", partial(checks.as_integers, dtype=np.int64)),
    "token_ids": ("T", partial(checks.as_integers, dtype=np.int32)),
    "probs": ("TLJ", checks.as_weights),
    "spec_probs": ("TLJ", checks.as_weights),
    "phase": ("T", partial(checks.as_integers, dtype=np.uint8)),
    "arrival_s": ("S", checks.as_seconds),
    "embeddings": ("Th", checks.as_finite),
}


def _checked(trace: RoutingTrace) -> dict[str, object]:
    """The fields in their final types; raises TraceError."""
    num_experts = checks.as_scalar("num_experts", trace.num_experts)
    if not 1 <= num_experts <= 65536:
        raise TraceError(f"num_experts is {num_experts}; 1 to 65536 is needed")
    ids = np.asarray(trace.expert_ids)
    checks.require_shape("expert_ids", ids, "TLK", {})
    extents = dict(zip("TLK", ids.shape, strict=True), J=num_experts)
    if extents["L"] < 1 or not 1 <= extents["K"] <= num_experts:
        raise TraceError(
            f"expert_ids has shape {list(ids.shape)} = [T, L, K]; at least one layer and K from 1 "
            f"to num_experts = {num_experts} are needed"
        )
    extents["S"] = np.size(trace.seq_start)
    result: dict[str, Any] = {
        "num_experts": num_experts,
        "expert_ids": checks.as_expert_ids(ids, num_experts),
    }
    for name, (letters, convert) in _ARRAYS.items():
        if getattr(trace, name) is not None:
            array = np.asarray(getattr(trace, name))
            checks.require_shape(name, array, letters, extents)
            result[name] = convert(name, array)
    checks.check_sequences(result["seq_start"], result["seq_len"], extents["T"])
    if "phase" in result:
        phase = result["phase"]
        checks.require_all("phase", phase, phase <= DECODE, "0 is prefill, 1 is decode")
    return result


def load_trace(path: str | os.PathLike[str]) -> RoutingTrace:
    """Reads a trace. Arrays that the format does not know are left out, with a warning.

    Raises TraceError, naming the file, if it cannot be read or is not well-formed.
    """
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise TraceError(f"{path}: one bare array; a routing trace is an npz archive")
            missing = [name for name in _REQUIRED if name not in archive.files]
            if missing:
                raise TraceError(
                    f"{path}: no {', '.join(missing)}; a routing trace holds {', '.join(_REQUIRED)}"
                )
            unknown = [name for name in archive.files if name not in _FIELDS]
            arrays: dict[str, Any] = {
                name: archive[name] for name in archive.files if name in _FIELDS
            }
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    # RuntimeError: encrypted, or compressed by a method that zipfile does not know.
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{path}: not an npz archive, or damaged: {error}") from error
    if unknown:
        warnings.warn(f"{path}: {', '.join(unknown)} left out: unknown to the format", stacklevel=2)
    try:
        return RoutingTrace(**arrays)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def save_trace(path: str | os.PathLike[str], trace: RoutingTrace) -> None:
    """Writes a compressed npz; a reader sees the old file or all of the new one.

    Raises TraceError if the folder cannot be written.
    """
    path = Path(path)
    arrays = {name: getattr(trace, name) for name in _FIELDS if getattr(trace, name) is not None}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with unfinished.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error
