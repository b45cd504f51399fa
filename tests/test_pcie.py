"""What is read of a GPU's link. NVIDIA's library is the only stand-in: it needs a GPU."""

import pynvml
import pytest

from fmoe_ray.pcie import PcieLink, read_link


def test_a_link_says_what_it_is() -> None:
    link = PcieLink(generation=5, width=16, full_width=16, numa_node=1)
    assert str(link) == "PCIe 5 x16, NUMA node 1"
    assert str(PcieLink(generation=4, width=8, full_width=16, numa_node=None)) == "PCIe 4 x8"


def test_a_device_that_no_bus_knows_has_no_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxPcieLinkGeneration", lambda handle: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrPcieLinkWidth", lambda handle: 8)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", lambda handle: 16)

    class Address:
        busId = "00000000:FF:1F.7"

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", lambda handle: Address())
    link = read_link(None)
    assert link == PcieLink(generation=4, width=8, full_width=16, numa_node=None)
