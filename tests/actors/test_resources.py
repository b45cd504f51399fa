"""What replicas ask Ray for: they must start on any machine, and never share a GPU."""

from typing import Any

import pytest

from fmoe_ray.actors.resources import placement_options
from fmoe_ray.config import parse_settings


def options(device: str, num_shards: int) -> dict[str, Any]:
    return placement_options(
        parse_settings({"model": {"device": device}, "shards": {"num_shards": num_shards}})
    )


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_on_a_cpu_all_bundles_together_ask_for_less_than_two_cpus(num_shards: int) -> None:
    bundles = options("cpu", num_shards)["placement_group_bundles"]
    assert len(bundles) == num_shards
    assert sum(bundle["CPU"] for bundle in bundles) < 2
    assert all("GPU" not in bundle for bundle in bundles)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_every_shard_has_a_gpu_of_its_own_and_the_replica_none(num_shards: int) -> None:
    chosen = options("cuda", num_shards)
    assert [bundle["GPU"] for bundle in chosen["placement_group_bundles"]] == [1] * num_shards
    assert chosen["ray_actor_options"]["num_gpus"] == 0
    assert chosen["placement_group_strategy"] == "STRICT_PACK"


def test_the_first_bundle_has_room_for_the_replica() -> None:
    chosen = options("cpu", 3)
    first, second, _ = chosen["placement_group_bundles"]
    room = first["CPU"] - second["CPU"]
    assert room == pytest.approx(chosen["ray_actor_options"]["num_cpus"])
