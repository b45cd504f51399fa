"""What replicas and shards ask Ray for."""

from typing import Any

from fmoe_ray.config import Settings

# On a CPU everything together stays below 2 CPUs, so that it starts on any machine.
REPLICA_CPUS_ON_CPU = 0.3
SHARDS_CPUS_ON_CPU = 1.2
REPLICA_CPUS_ON_GPU = 1.0
SHARD_CPUS_ON_GPU = 2.0


def shard_resources(settings: Settings) -> dict[str, float]:
    """Options of one shard's actor."""
    if settings.model.device == "cuda":
        return {"num_gpus": 1, "num_cpus": SHARD_CPUS_ON_GPU}
    return {"num_gpus": 0, "num_cpus": round(SHARDS_CPUS_ON_CPU / settings.shards.num_shards, 3)}


def replica_cpus(settings: Settings) -> float:
    return REPLICA_CPUS_ON_GPU if settings.model.device == "cuda" else REPLICA_CPUS_ON_CPU


def placement_options(settings: Settings) -> dict[str, Any]:
    """Options of the deployment: one bundle a shard; the first has room for the replica too."""
    shard = shard_resources(settings)
    bundle = {"CPU": shard["num_cpus"]}
    if shard["num_gpus"]:
        bundle["GPU"] = shard["num_gpus"]
    first = {**bundle, "CPU": round(bundle["CPU"] + replica_cpus(settings), 3)}
    return {
        "ray_actor_options": {"num_cpus": replica_cpus(settings), "num_gpus": 0},
        "placement_group_bundles": [first] + [bundle] * (settings.shards.num_shards - 1),
        "placement_group_strategy": settings.shards.placement,
    }
