"""Whether nodes can hold a replica: arithmetic over resources, no cluster."""

import pytest

from fmoe_ray.actors.cluster import find_lack
from fmoe_ray.config import Settings, parse_settings

GPU_NODE = {"GPU": 2.0, "CPU": 16.0}


def settings(num_shards: int, placement: str = "STRICT_PACK", device: str = "cuda") -> Settings:
    return parse_settings(
        {
            "model": {"device": device},
            "shards": {"num_shards": num_shards, "placement": placement},
        }
    )


@pytest.mark.parametrize("placement", ["STRICT_PACK", "PACK", "SPREAD"])
def test_what_fits_lacks_nothing(placement: str) -> None:
    assert find_lack(settings(2, placement), [{}, GPU_NODE]) is None


def test_shards_on_one_node_need_one_node_with_all_gpus() -> None:
    lack = find_lack(settings(3), [GPU_NODE, GPU_NODE])
    assert lack == "3 GPUs are needed on one node, 2 are there"
    assert find_lack(settings(3, "PACK"), [GPU_NODE, GPU_NODE]) is None
    lack = find_lack(settings(5, "SPREAD"), [GPU_NODE, GPU_NODE])
    assert lack == "5 GPUs are needed on the cluster, 4 are there"


def test_the_processors_must_be_where_the_gpus_are() -> None:
    lack = find_lack(settings(2), [{"GPU": 2.0, "CPU": 2.0}, {"CPU": 64.0}])
    assert lack == "5 CPUs are needed on one node, 2 are there"


def test_shards_on_processors_fit_on_two_of_them_whatever_their_number() -> None:
    for num_shards in (1, 3, 8):
        assert find_lack(settings(num_shards, device="cpu"), [{"CPU": 2.0}]) is None
