"""The PCIe link of a GPU: how wide it is, and which processors it is near to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieLink:
    generation: int
    width: int
    full_width: int
    numa_node: int | None

    def __str__(self) -> str:
        near = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        return f"PCIe {self.generation} x{self.width}{near}"


def read_link(handle: Any) -> PcieLink:
    """Of a device of pynvml. Its generation is the best of both ends: an idle link slows down.

    Raises pynvml.NVMLError where the driver does not tell, as for a part of a GPU.
    """
    return PcieLink(
        generation=pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        width=pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        full_width=pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        numa_node=_numa_node(pynvml.nvmlDeviceGetPciInfo(handle).busId),
    )


def _numa_node(bus_id: str) -> int | None:
    node = Path("/sys/bus/pci/devices") / bus_id.lower()[-12:] / "numa_node"
    number = int(node.read_text()) if node.is_file() else -1
    return None if number == -1 else number
