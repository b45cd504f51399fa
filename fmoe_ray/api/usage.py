"""The `usage` block of an answer, with the expert statistics as its extension `fmoe`."""

from collections.abc import Sequence
from typing import Any

from fmoe_ray.engine.request import Usage


def usage_body(usages: Sequence[Usage], num_samples: int) -> dict[str, Any]:
    """Of all choices together; each prompt was sampled `num_samples` times and counts once.

    Counts, bytes and stalls are sums, waiting times the longest, tpot_ms the mean.
    """
    prompt_tokens = sum(usage.prompt_tokens for usage in usages) // num_samples
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "fmoe": {
            "hits": sum(usage.hits for usage in usages),
            "late": sum(usage.late for usage in usages),
            "misses": sum(usage.misses for usage in usages),
            "bytes": sum(usage.num_bytes for usage in usages),
            "stall_ms": _ms(sum(usage.stall_s for usage in usages)),
            "queue_ms": _ms(max(usage.queue_s for usage in usages)),
            "ttft_ms": _ms(max(usage.ttft_s for usage in usages)),
            "tpot_ms": _ms(sum(usage.tpot_s for usage in usages) / len(usages)),
        },
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
