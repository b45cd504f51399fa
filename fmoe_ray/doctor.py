"""Examines the machine: processors, memory, GPUs, versions, leftovers. Changes nothing."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pynvml
from packaging.requirements import Requirement

from fmoe_ray.pcie import read_link

SHM = Path("/dev/shm")
STORE_PREFIX = "fmoe-"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    name: str
    value: str
    is_ok: bool = True
    remedy: str = ""


def examine() -> list[Finding]:
    core = _compiled_core()
    return [
        _processors(),
        *([_memory()] if core.is_ok else []),
        *_shared_memory(),
        *_stale_stores(),
        *_gpus(),
        *_versions(("torch", "transformers", "ray")),
        core,
    ]


def _processors() -> Finding:
    usable = len(os.sched_getaffinity(0))
    value = f"{usable} of {os.cpu_count()} usable, {platform.machine()}"
    remedy = "" if usable > 1 else "copies and computation share one core; give the process two"
    return Finding(name="cpu", value=value, is_ok=usable > 1, remedy=remedy)


def _memory() -> Finding:
    """Available, not total: some machines grow, and others share what they have."""
    from fmoe_ray.cache import available_memory_bytes

    available = available_memory_bytes()
    is_ok = available > 2 * _GIB
    remedy = "" if is_ok else "experts live in host memory; free some or raise the limit"
    value = f"{available / _GIB:.1f} GiB available"
    return Finding(name="memory", value=value, is_ok=is_ok, remedy=remedy)


def _shared_memory() -> Iterator[Finding]:
    if not SHM.is_dir():
        yield Finding(name="shm", value="no /dev/shm", is_ok=False, remedy="mount a tmpfs there")
        return
    status = os.statvfs(SHM)
    total = status.f_blocks * status.f_frsize / _GIB
    free = status.f_bavail * status.f_frsize / _GIB
    is_ok = free > 1
    remedy = "" if is_ok else "experts are stored there: start the container with --shm-size"
    yield Finding(
        name="shm", value=f"{free:.1f} of {total:.1f} GiB free", is_ok=is_ok, remedy=remedy
    )


def _stale_stores() -> Iterator[Finding]:
    for path in sorted(SHM.glob(f"{STORE_PREFIX}*")):
        size = path.stat().st_size / _GIB
        if not _is_mapped(path):
            yield Finding(
                name="stale store",
                value=f"{path} holds {size:.2f} GiB and no process uses it",
                is_ok=False,
                remedy=f"rm {path}",
            )


def _is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except (PermissionError, ProcessLookupError, FileNotFoundError):
            continue  # another user's process, or one that has just ended
    return False


def _gpus() -> Iterator[Finding]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding(
            name="gpu",
            value=f"none ({error})",
            remedy="models run on the CPU; for a GPU install NVIDIA's driver",
        )
        return
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        yield Finding(name="driver", value=str(driver))
        for index in range(pynvml.nvmlDeviceGetCount()):
            yield _gpu(index)
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    link = read_link(handle)
    free, total = int(memory.free) / _GIB, int(memory.total) / _GIB
    value = f"{pynvml.nvmlDeviceGetName(handle)}, {free:.1f} of {total:.1f} GiB free, {link}"
    is_ok = link.width >= link.full_width
    remedy = "" if is_ok else f"the link could be x{link.full_width}: check the slot"
    return Finding(name=f"gpu {index}", value=value, is_ok=is_ok, remedy=remedy)


def _versions(names: tuple[str, ...]) -> Iterator[Finding]:
    required = [Requirement(text) for text in metadata.requires("fmoe-ray") or []]
    tested = {item.name: item.specifier for item in required if item.marker is None}
    for name in names:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name=name, value="missing", is_ok=False, remedy=f"pip install {name}")
            continue
        is_ok = tested[name].contains(version)
        remedy = "" if is_ok else f"tested with {tested[name]}; install such a version"
        yield Finding(name=name, value=version, is_ok=is_ok, remedy=remedy)


def _compiled_core() -> Finding:
    spec = importlib.util.find_spec("fmoe_ray._native")
    remedy = "" if spec else "install the package: pip install fmoe-ray, or pip install -e ."
    return Finding(
        name="compiled core",
        value="missing" if spec is None else str(spec.origin),
        is_ok=spec is not None,
        remedy=remedy,
    )
