"""The link between host memory and a GPU, measured when an engine starts."""

import logging
import time

import pynvml
import torch

from fmoe_ray.pcie import read_link

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 26
_COPIES = 4


def log_link(device: torch.device) -> None:
    """What the link is, and how fast it copies page-locked memory now; the best of a few copies.

    A link that is narrower or slower than expected is the first thing to look for when experts
    come late, and the NUMA node says where the process should run.
    """
    logger.info("%s: %s, host to device %.1f GB/s", device, _describe(device), _rate(device) / 1e9)


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


def _rate(device: torch.device) -> float:
    """Bytes a second."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(_COPIES):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    del host, there
    torch.cuda.empty_cache()  # or expert slots would go without it
    return _COPY_BYTES / min(seconds)
