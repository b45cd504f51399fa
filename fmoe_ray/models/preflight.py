"""Says before anything is loaded whether this machine can serve a model, and what it lacks."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from fmoe_ray.config import Budget, Settings
from fmoe_ray.errors import CapacityError, CheckpointNotFoundError, ConfigError, FmoeError
from fmoe_ray.models.architecture import Architecture, build_architecture
from fmoe_ray.models.checkpoint import is_hub_name, open_checkpoint, resolve
from fmoe_ray.models.device import choose_dtype

STORE_FOLDER = Path("/dev/shm")
_ARCHITECTURES = Path(__file__).parents[1] / "assets" / "architectures"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes that a model takes, without keys and values, which grow with use."""

    store_bytes: int
    """All experts, in shared memory."""
    dense_bytes: int
    """Everything else, on each device."""
    slot_bytes: int
    """The expert budget, on each device."""
    num_host_devices: int
    """Shards that compute on the CPU of this machine; 0 with GPUs."""

    @property
    def host_bytes(self) -> int:
        return self.store_bytes + (self.dense_bytes + self.slot_bytes) * self.num_host_devices

    @property
    def device_bytes(self) -> int:
        return 0 if self.num_host_devices else self.dense_bytes + self.slot_bytes

    def __str__(self) -> str:
        device = "" if self.num_host_devices else f" and {_gib(self.device_bytes)} of GPU memory"
        return f"{_gib(self.host_bytes)} of host memory{device}"


def needs_of(architecture: Architecture, settings: Settings, device: torch.device) -> Needs:
    """From the architecture alone. An automatic budget on a GPU takes what is left, so one expert
    is counted. Raises ConfigError for an impossible budget.
    """
    experts = architecture.expert_parameters
    parameters = architecture.model.named_parameters()
    budget = settings.offload.budget
    if budget.is_automatic and device.type == "cuda":
        budget = Budget(num_experts=1)
    num_experts = architecture.num_layers * architecture.num_experts
    blob_bytes = architecture.layout.blob_bytes
    slots = budget.slots(
        num_experts=-(-num_experts // settings.shards.num_shards),
        expert_bytes=blob_bytes,
        min_slots=1,
    )
    return Needs(
        store_bytes=num_experts * blob_bytes,
        dense_bytes=sum(p.nbytes for name, p in parameters if name not in experts),
        slot_bytes=slots * blob_bytes,
        num_host_devices=settings.shards.num_shards if device.type == "cpu" else 0,
    )


def check_machine(settings: Settings) -> Needs:
    """Quick, and downloads nothing but a config.json. What is missing is told all at once.

    Raises CheckpointNotFoundError without the weights, ConfigError without the GPU, CapacityError
    with what is needed and what is available; CheckpointError and UnsupportedModelError for a
    checkpoint that cannot be served anywhere.
    """
    path = settings.model.path
    device = _intended_device(settings)
    lacks: list[tuple[type[FmoeError], str]] = []
    folder = _config_folder(path)
    needs = None
    if folder is None:
        lacks.append((CheckpointNotFoundError, f"the checkpoint (fetch it: `hf download {path}`)"))
    else:
        dtype = choose_dtype(settings.model.dtype, device)
        needs = needs_of(build_architecture(folder, dtype), settings, device)
        if is_hub_name(path) and not any(folder.glob("*.safetensors")):
            lacks.append(
                (CheckpointNotFoundError, f"the weights (fetch them: `hf download {path}`)")
            )
        else:
            open_checkpoint(folder)
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
        (f"shared memory in {STORE_FOLDER}", needs.store_bytes, _free_bytes(STORE_FOLDER)),
    ]
    if device.type == "cuda" and torch.cuda.is_available():
        places.append(("GPU memory", needs.device_bytes, torch.cuda.mem_get_info(device)[0]))
    for what, needed, available in places:
        if needed > available:
            yield f"{_gib(needed)} of {what} ({_gib(available)} available)"


def available_memory_bytes() -> int:
    """What the kernel, and the container's limit, still give. Never from the total: hosts grow."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
