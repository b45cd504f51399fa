"""Whether the cluster and its nodes can hold a replica: found out before anything is placed."""

import asyncio
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fmoe_ray.actors.autoscaler import can_ever_hold
from fmoe_ray.actors.resources import placement_options, shard_resources
from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Backend
from fmoe_ray.errors import CapacityError, FmoeError


def check_cluster(settings: Settings, backend: Backend) -> None:
    """A placement group that no node can hold would wait for ever, and say nothing.

    Raises CapacityError, or what `backend.check` raises if this is the only node.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    lack = find_lack(settings, nodes)
    if lack is None:
        return
    if settings.shards.wait_for_nodes:
        options = placement_options(settings)
        if can_ever_hold(options["placement_group_bundles"], options["placement_group_strategy"]):
            return
        raise CapacityError(
            f"{lack}, and no node type that the autoscaler may add has them; set fewer "
            "shards.num_shards, or give the cluster a larger node type"
        )
    if len(nodes) == 1 and settings.model.device == "cuda":
        backend.check(settings)  # knows what else is missing
    raise CapacityError(
        f"{lack}; start Ray where they are, set model.device: cpu, or set shards.wait_for_nodes: "
        "true if the cluster adds nodes by itself"
    )


def find_lack(settings: Settings, nodes: list[dict[str, float]]) -> str | None:
    """Which resource of one replica `nodes` can never give, whatever else runs on them."""
    bundles = placement_options(settings)["placement_group_bundles"]
    is_packed = settings.shards.placement == "STRICT_PACK"
    where = "one node" if is_packed else "the cluster"
    for name in ("GPU", "CPU"):
        needed = round(sum(bundle.get(name, 0) for bundle in bundles), 3)
        amounts = [node.get(name, 0) for node in nodes]
        found = max(amounts, default=0) if is_packed else sum(amounts)
        if found < needed:
            return f"{needed:g} {name}s are needed on {where}, {found:g} are there"
        if is_packed:
            nodes = [node for node in nodes if node.get(name, 0) >= needed]
    return None


async def check_node(settings: Settings, backend: Backend, group: PlacementGroup) -> None:
    """Checks the node of the first shard, and its GPU as the shard will see it.

    Raises what `backend.check` raises, CapacityError if there is no answer within
    `shards.start_timeout_s`.
    """
    if settings.model.device != "cuda":
        await asyncio.to_thread(backend.check, settings)
        return
    # In a process of its own: a look at a GPU creates a CUDA context that stays with the process.
    check = _check.options(
        **shard_resources(settings),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    )
    timeout_s = settings.shards.start_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await check.remote(settings, backend)
    except TimeoutError as error:
        raise CapacityError(
            f"the node of the first shard was not examined within {timeout_s:g} s "
            "(shards.start_timeout_s); see `ray status` for resources that are missing"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, FmoeError) else error from None


def _check_here(settings: Settings, backend: Backend) -> None:
    backend.check(settings)


_check: Any = ray.remote(max_retries=0, max_calls=1)(_check_here)
