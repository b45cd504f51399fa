"""Says before anything is loaded whether this machine can serve a model, and what it lacks."""

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from fmoe_ray.cache import Geometry, available_memory_bytes
from fmoe_ray.config import Budget, Settings
from fmoe_ray.errors import CapacityError, CheckpointNotFoundError, ConfigError, FmoeError
from fmoe_ray.models.architecture import Architecture, build_architecture
from fmoe_ray.models.checkpoint import is_hub_name, open_checkpoint, resolve
from fmoe_ray.models.context import context_limit
from fmoe_ray.models.device import choose_dtype
from fmoe_ray.models.dry_run import dry_run
from fmoe_ray.models.loader import store_name
from fmoe_ray.policy import check_settings, make_policy

STORE_FOLDER = Path("/dev/shm")
_ARCHITECTURES = Path(__file__).parents[1] / "assets" / "architectures"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes that a model takes."""

    store_bytes: int
    """All experts, in shared memory."""
    dense_bytes: int
    """Everything else, on each device."""
    slot_bytes: int
    """The expert budget, on each device."""
    kv_bytes: int
    """Keys and values of `engine.max_batch_size` requests of `engine.max_context` tokens, on each
    device."""
    num_host_devices: int
    """Shards that compute on the CPU of this machine; 0 with GPUs."""
    stored_bytes: int = 0
    """Of the store, what is in shared memory already: another replica's, or left behind."""

    @property
    def new_store_bytes(self) -> int:
        return self.store_bytes - min(self.stored_bytes, self.store_bytes)

    @property
    def host_bytes(self) -> int:
        return self.new_store_bytes + self._bytes_per_device * self.num_host_devices

    @property
    def device_bytes(self) -> int:
        return 0 if self.num_host_devices else self._bytes_per_device

    @property
    def _bytes_per_device(self) -> int:
        return self.dense_bytes + self.slot_bytes + self.kv_bytes

    def __str__(self) -> str:
        device = "" if self.num_host_devices else f" and {_gib(self.device_bytes)} of GPU memory"
        return (
            f"{_gib(self.host_bytes)} of host memory{device}, {_gib(self.kv_bytes)} a device of it "
            "for keys and values (engine.max_batch_size, engine.max_context)"
        )


def needs_of(architecture: Architecture, settings: Settings, device: torch.device) -> Needs:
    """From the architecture alone, whose model is of no other use afterwards. An automatic budget
    takes what is left, so the fewest experts that can run are counted.

    Raises ConfigError for a budget, policy or context that the model cannot run with,
    UnsupportedModelError for a model that cannot run.
    """
    experts = architecture.expert_parameters
    parameters = architecture.model.named_parameters()
    budget = settings.offload.budget
    demands = dry_run(architecture)
    num_experts = architecture.num_layers * architecture.num_experts
    num_own = -(-num_experts // settings.shards.num_shards)
    min_slots = min(demands.top_k, num_own)
    if budget.is_automatic:
        budget = Budget(num_experts=min_slots)
    blob_bytes = architecture.layout.blob_bytes
    slots = budget.slots(num_experts=num_own, expert_bytes=blob_bytes, min_slots=min_slots)
    make_policy(  # refuses what does not fit
        settings.offload.policy,
        geometry=Geometry(architecture.num_layers, architecture.num_experts, demands.top_k),
        num_slots=slots if not settings.offload.budget.is_automatic else num_own,
        store_capacity=1,
        eviction=settings.offload.eviction,
        num_shards=settings.shards.num_shards,
    )
    max_context = context_limit(settings, architecture.config)
    return Needs(
        store_bytes=num_experts * blob_bytes,
        dense_bytes=sum(p.nbytes for name, p in parameters if name not in experts),
        slot_bytes=slots * blob_bytes,
        kv_bytes=demands.kv_bytes_per_token * settings.engine.max_batch_size * max_context,
        num_host_devices=settings.shards.num_shards if device.type == "cpu" else 0,
    )


def check_machine(settings: Settings) -> Needs:
    """Quick, and downloads nothing but a config.json. What is missing is told all at once.

    Raises ConfigError for a policy or budget that cannot run and for a setting without effect,
    CheckpointNotFoundError without the weights, ConfigError without the GPU, CapacityError
    with what is needed and what is available; CheckpointError and UnsupportedModelError for a
    checkpoint that cannot be served anywhere.
    """
    path = settings.model.path
    device = _intended_device(settings)
    check_settings(settings, device.type)
    _check_threads(settings.engine.num_threads)
    _check_writable("offload.record_path", settings.offload.record_path)
    _check_writable("offload.store_path", settings.offload.store_path, makes_folders=True)
    lacks: list[tuple[type[FmoeError], str]] = []
    folder = _config_folder(path)
    needs = None
    if folder is None:
        lacks.append((CheckpointNotFoundError, f"the checkpoint (fetch it: `hf download {path}`)"))
    else:
        dtype = choose_dtype(settings.model.dtype, device)
        architecture = build_architecture(folder, dtype)
        needs = needs_of(architecture, settings, device)
        if is_hub_name(path) and not any(folder.glob("*.safetensors")):
            lacks.append(
                (CheckpointNotFoundError, f"the weights (fetch them: `hf download {path}`)")
            )
        else:
            name = store_name(open_checkpoint(folder), architecture)
            needs = replace(needs, stored_bytes=_allocated_bytes(STORE_FOLDER / name))
    if device.type == "cuda" and not torch.cuda.is_available():
        lacks.append((ConfigError, "an NVIDIA GPU (torch finds none; or set model.device: cpu)"))
    if needs is not None:
        lacks += [(CapacityError, text) for text in _shortages(needs, device)]
    if lacks or needs is None:
        needed = "" if needs is None else f" It needs {needs}."
        raise lacks[0][0](
            f"{path} cannot be served here, it lacks {'; '.join(text for _, text in lacks)}."
            f"{needed} Available: {_gib(available_memory_bytes())} of host memory, "
            f"{torch.cuda.device_count()} GPUs."
        )
    return needs


def _check_threads(num_threads: int | None) -> None:
    """More threads than processors only wait for each other, thousands of them for ever. A few
    times as many still end, so one file may serve machines that differ that much.
    """
    num_processors = os.cpu_count() or 1
    if num_threads is not None and num_threads > 4 * num_processors:
        raise ConfigError(
            f"engine.num_threads {num_threads}: this machine has {num_processors} processors; "
            f"give {num_processors}, and never more than {4 * num_processors}"
        )


def _check_writable(key: str, path: str | None, *, makes_folders: bool = False) -> None:
    """What is written at the end must not fail there."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    while makes_folders and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"{key} {path}: there is no folder {folder}; make it, or name another")
    if Path(path).is_dir():
        raise ConfigError(f"{key} {path}: is a folder; name a file")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{key} {path}: no file can be written in {folder} ({error.strerror}); name another"
        ) from error


def _intended_device(settings: Settings) -> torch.device:
    wants_cuda = settings.model.device == "cuda"
    if wants_cuda or (settings.model.device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda")
    return torch.device("cpu")


def _config_folder(path: str) -> Path | None:
    """Where a config.json is: the checkpoint's folder, the hub's cache, or this package's copy of
    the architecture; None if nowhere.
    """
    if not is_hub_name(path):
        return resolve(path)
    cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    if not _hub_has_address():
        known = _ARCHITECTURES / path
        return known if known.is_dir() else None
    try:
        return Path(huggingface_hub.hf_hub_download(path, "config.json")).parent
    except LocalEntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointNotFoundError(
            f"{path}: the hub refuses it ({error}); check the name, and `hf auth login` for a "
            "model that asks for consent"
        ) from error


def _hub_has_address() -> bool:
    """False without a network, where the hub's client would retry for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    host = urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _shortages(needs: Needs, device: torch.device) -> Iterator[str]:
    places = [
        ("host memory", needs.host_bytes, available_memory_bytes()),
        (f"shared memory in {STORE_FOLDER}", needs.new_store_bytes, _free_bytes(STORE_FOLDER)),
    ]
    if device.type == "cuda" and torch.cuda.is_available():
        places.append(("GPU memory", needs.device_bytes, torch.cuda.mem_get_info(device)[0]))
    for what, needed, available in places:
        if needed > available:
            yield f"{_gib(needed)} of {what} ({_gib(available)} available)"


def _allocated_bytes(path: Path) -> int:
    """What a store of this model, that runs or was left behind, has taken already: it is shared or
    replaced, and either way not needed a second time.
    """
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
