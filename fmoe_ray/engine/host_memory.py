"""What an automatic expert budget may take where experts are computed on the CPU."""

from fmoe_ray.cache import available_memory_bytes

RESERVE_BYTES = 2**30
"""Left free at least, and a tenth of what is available: for workspace, Ray and everything else."""


def free_host_bytes(kv_bytes: int, num_shards: int, available_bytes: int | None = None) -> int:
    """For the slots of one shard, after dense weights and host store were loaded; 0 if nothing is
    left. `available_bytes` is the machine's own answer if not given.

    Keys and values are allocated but not touched yet, so the kernel still counts their memory as
    available. The shards of a replica are taken to share the machine.
    """
    available = available_memory_bytes() if available_bytes is None else available_bytes
    usable = available - max(RESERVE_BYTES, available // 10)
    return max(0, usable // num_shards - kv_bytes)
