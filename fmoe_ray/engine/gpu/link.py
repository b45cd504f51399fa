"""The link between host memory and a GPU, measured when an engine starts."""

import logging
import time
from collections.abc import Callable

import pynvml
import torch

from fmoe_ray.pcie import read_link

logger = logging.getLogger(__name__)


def log_link(device: torch.device) -> None:
    """What the link is, and how fast it copies page-locked memory now; the best of a few copies.

    A link that is narrower or slower than expected is the first thing to look for when experts
    come late, and the NUMA node says where the process should run.
    """
    rate = copy_rate(device, num_bytes=1 << 26, times=4)
    torch.cuda.empty_cache()  # or expert slots would go without what was copied to
    logger.info("%s: %s, host to device %.1f GB/s", device, _describe(device), rate / 1e9)


def _describe(device: torch.device) -> str:
    try:
        pynvml.nvmlInit()
        try:
            uuid = torch.cuda.get_device_properties(device).uuid
            return str(read_link(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"PCIe link not known ({error})"


def copy_rate(device: torch.device, *, num_bytes: int, times: int) -> float:
    """Bytes a second from page-locked host memory, the best of `times` copies; on a CPU within
    its memory.
    """
    is_cuda = device.type == "cuda"
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    seconds = best_time(lambda: there.copy_(host, non_blocking=True), device, times)
    return num_bytes / seconds


def best_time(call: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of the fastest call, from an idle device until it is idle again."""
    seconds = []
    for _ in range(times):
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
