"""Reads a checkpoint's tensors into the model: the dense ones through transformers' own loading,
the experts one by one into their blobs, so that no layer's experts ever exist twice.

Uses private names of transformers 5.24; tests/models/test_loader.py guards them per family.
"""

import copy
import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from fmoe_ray.errors import CheckpointError, UnsupportedModelError
from fmoe_ray.models.architecture import Architecture
from fmoe_ray.models.checkpoint import Checkpoint
from fmoe_ray.models.mxfp4 import BLOCKS, SCALES, PackedExperts

_TRIM_EVERY_BYTES = 32 * 2**20

Progress = Callable[[int, int], None]
"""Called with experts done and experts in all."""


class BlobStore(Protocol):
    """Where experts go; blob l * J + j is expert j of MoE layer l."""

    def blob(self, index: int) -> npt.NDArray[np.uint8]: ...


@dataclass(kw_only=True)
class _Source:
    """The checkpoint tensors that make up one fused expert parameter."""

    converter: Any | None
    """None where the checkpoint is fused already."""
    slices: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    """Source pattern to (key, lazy slice), experts in ascending order."""


def _return_freed_memory() -> None:
    """The C library keeps what is freed, in pieces of a tensor's size: a few hundred megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class WeightReader:
    """An open checkpoint, its keys sorted into dense tensors and expert parameters.

    A context manager: the files stay open in between.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._mapping = get_model_conversion_mapping(architecture.model)
        self._dense: dict[str, Any] = {}
        self._experts: dict[str, _Source] = {}
        self._files = ExitStack()

    def __enter__(self) -> "WeightReader":
        slices: dict[str, Any] = {}
        for path in self._checkpoint.files:
            opened = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
            slices.update({key: opened.get_slice(key) for key in opened.keys()})
        self._sort(slices)
        return self

    def __exit__(self, *error: object) -> None:
        self._dense.clear()
        self._experts.clear()
        self._files.close()

    def _sort(self, slices: dict[str, Any]) -> None:
        model = self._architecture.model
        targets = self._architecture.expert_parameters
        meta = model.state_dict()
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        packed: dict[str, dict[str, str]] = {}

        def rename(key: str) -> tuple[str, str | None]:
            target, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, meta
            )
            return (key, None) if target not in meta and key in meta else (target, pattern)

        for key in sorted(slices, key=dot_natural_key):
            target, pattern = rename(key)
            if target not in targets:
                suffix = next((end for end in (BLOCKS, SCALES) if key.endswith(end)), "")
                unpacked, pattern = rename(key.removesuffix(suffix))
                if unpacked in targets:
                    if pattern is not None:
                        raise UnsupportedModelError(
                            f"{self._checkpoint.folder}: {key}: MXFP4 is supported where one "
                            f"tensor holds {unpacked} of all experts as the model keeps it; use a "
                            "bfloat16, float16 or float32 version of the model"
                        )
                    packed.setdefault(unpacked, {})[suffix] = key
                else:
                    self._dense[key] = slices[key]
                continue
            converter = None if pattern is None else by_pattern[pattern]
            source = self._experts.setdefault(target, _Source(converter=converter))
            source.slices.setdefault(pattern or key, []).append((key, slices[key]))
        for target, keys in packed.items():
            self._add_packed(target, keys, slices)
        missing = sorted(set(targets) - set(self._experts))
        if missing:
            raise CheckpointError(
                f"{self._checkpoint.folder}: no tensors for {missing[0]} "
                f"({len(missing)} expert parameters missing); the checkpoint does not fit its "
                "config.json"
            )

    def _add_packed(self, target: str, keys: dict[str, str], slices: dict[str, Any]) -> None:
        """`keys` are those of the parameter's codes and scales, by the end of their names."""
        folder, architecture = self._checkpoint.folder, self._architecture
        for here, lacking in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
            if lacking not in keys:
                raise CheckpointError(
                    f"{folder}: {keys[here]} is there without {target}{lacking}, which MXFP4 "
                    "needs beside it; download again"
                )
        if target in self._experts:
            raise CheckpointError(
                f"{folder}: {target} is stored twice, in MXFP4 and as it is; remove one of them"
            )
        layer, name = architecture.expert_parameters[target]
        field = next(field for field in architecture.layout.fields if field.name == name)
        tensor = PackedExperts(
            f"{folder}: {target}",
            slices[keys[BLOCKS]],
            slices[keys[SCALES]],
            is_transposed=bool(list(architecture.experts.values())[layer].is_transposed),
            dtype=field.dtype,
        )
        expected = (architecture.num_experts, *field.shape)
        if tensor.get_shape() != expected:
            raise CheckpointError(
                f"{folder}: {target} in MXFP4 has shape {tensor.get_shape()}, {expected} expected"
            )
        self._experts[target] = _Source(converter=None, slices={target: [(target, tensor)]})

    def load_dense(self, device: torch.device, dtype: torch.dtype) -> None:
        """Materialises everything but the experts in the architecture's model, which stay on meta.

        Raises CheckpointError for tensors that are missing, left over or of another shape.
        """
        model = self._architecture.model
        experts = set(self._architecture.expert_parameters)
        config = LoadStateDictConfig(
            pretrained_model_name_or_path=str(self._checkpoint.folder),
            device_map={"": device},
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=self._mapping,
        )
        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(model, self._dense, config)
            self._refuse("of another shape", info.mismatched_keys)
            self._refuse("not convertible", info.conversion_errors)
            info.missing_keys -= experts
            for name in experts:  # or finalising would allocate and initialise them
                model.get_parameter(name)._is_hf_initialized = True
            info = model._finalize_model_loading(model, config, info)
            self._refuse("missing", info.missing_keys)
        model.eval()
        model.requires_grad_(False)

    def _refuse(self, what: str, keys: Collection[Any]) -> None:
        if keys:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {len(keys)} tensors are {what}, for example "
                f"{min(map(str, keys))}; the checkpoint does not fit its config.json"
            )

    def load_experts(self, store: BlobStore, progress: Progress | None = None) -> None:
        """Writes every expert into its blob, converted to the architecture's types.

        Raises CheckpointError for a tensor that is missing or whose shape does not fit.
        """
        architecture = self._architecture
        total = architecture.num_layers * architecture.num_experts
        converted_bytes = 0
        for layer, module in enumerate(architecture.experts):
            readers = {
                f.name: self._read(f"{module}.{f.name}", self._experts[f"{module}.{f.name}"])
                for f in architecture.layout.fields
            }
            for expert in range(architecture.num_experts):
                index = layer * architecture.num_experts + expert
                self._load_expert(store.blob(index), f"{module}: expert {expert}", readers)
                converted_bytes += architecture.layout.blob_bytes
                if converted_bytes >= _TRIM_EVERY_BYTES:
                    converted_bytes = 0
                    _return_freed_memory()
                if progress is not None:
                    progress(index + 1, total)

    def _load_expert(
        self,
        blob: npt.NDArray[np.uint8],
        name: str,
        readers: dict[str, Iterator[torch.Tensor]],
    ) -> None:
        views = self._architecture.layout.numpy_views(blob)
        try:
            for field_name, reader in readers.items():
                tensor = next(reader)
                if tensor.shape != views[field_name].shape:
                    raise CheckpointError(
                        f"{self._checkpoint.folder}: {name}: {field_name} has shape "
                        f"{tuple(tensor.shape)}, {tuple(views[field_name].shape)} expected"
                    )
                views[field_name].copy_(tensor)
        finally:
            del blob, views  # an error's traceback would keep the store mapped

    def _read(self, target: str, source: _Source) -> Iterator[torch.Tensor]:
        """Yields the parameter of expert 0, 1, ..., holding one expert in memory where it can."""
        num_experts = self._architecture.num_experts
        lists = list(source.slices.values())
        if source.converter is None:
            fused = lists[0][0][1]
            if fused.get_shape()[0] != num_experts:
                raise CheckpointError(
                    f"{self._checkpoint.folder}: {target} holds {fused.get_shape()[0]} experts, "
                    f"{num_experts} expected"
                )
            for expert in range(num_experts):
                yield fused[expert]
        elif all(len(keys) == num_experts for keys in lists):
            for expert in range(num_experts):
                yield self._convert(target, source, slice(expert, expert + 1))[0]
        else:  # a conversion that needs the whole layer at once
            yield from self._convert(target, source, slice(None))

    def _convert(self, target: str, source: _Source, experts: slice) -> torch.Tensor:
        converter = copy.deepcopy(source.converter)
        assert converter is not None
        for pattern, keys in source.slices.items():
            for key, lazy in keys[experts]:
                converter.add_tensor(target, key, pattern, lambda lazy=lazy: lazy[...])
        model = self._architecture.model
        try:
            converted = converter.convert(target, model=model, config=model.config)[target]
        except RuntimeError as error:  # torch's, of a tensor of another shape or one too few
            counts = ", ".join(f"{len(k)} of {pattern}" for pattern, k in source.slices.items())
            raise CheckpointError(
                f"{self._checkpoint.folder}: the tensors of {target} do not fit together "
                f"({counts}): {error}; download again"
            ) from error
        tensor: torch.Tensor = converted[0] if isinstance(converted, list) else converted
        return tensor


def initialise_dense(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
    """Materialises everything but the experts with the family's own random initialisation."""
    model = architecture.model
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=None,
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=[],
    )
    experts = set(architecture.expert_parameters)
    with _quiet():
        info, _ = convert_and_load_state_dict_in_model(model, {}, config)
        info.missing_keys -= experts
        for name in experts:
            model.get_parameter(name)._is_hf_initialized = True
        model._finalize_model_loading(model, config, info)
    model.eval()
    model.requires_grad_(False)


class _quiet:
    """Silences transformers' own progress bar and loading report: ours replace them."""

    def __enter__(self) -> None:
        self._verbosity = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        transformers_logging.set_verbosity(self._verbosity)
        if self._bars:
            transformers_logging.enable_progress_bar()
