"""One result of a step from those of all its shards."""

from collections.abc import Sequence
from functools import reduce

import msgspec

from fmoe_ray.engine.messages import ExpertCounts, StepResult, StepStats


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """Rank 0's tokens, with the experts of all shards counted. `results` are in order of rank.

    A step fails if a shard says so or if the shards disagree on what the gates chose.
    """
    first = results[0]
    if len(results) == 1:
        return first
    for rank, result in enumerate(results):
        if result.error is not None:
            return msgspec.structs.replace(first, rows=[], error=f"shard {rank}: {result.error}")
    for rank, result in enumerate(results):
        if result.routing_checksum != first.routing_checksum:
            error = (
                f"step {first.step}: shards 0 and {rank} chose different experts, so their numbers "
                "differ; are they the same kind of device with the same software?"
            )
            return msgspec.structs.replace(first, rows=[], error=error)
    rows = [
        msgspec.structs.replace(own[0], experts=reduce(_add_counts, [row.experts for row in own]))
        for own in zip(*(result.rows for result in results), strict=True)
    ]
    stats = reduce(_add_stats, [result.stats for result in results])
    return msgspec.structs.replace(first, rows=rows, stats=stats)


def _add_counts(one: ExpertCounts, other: ExpertCounts) -> ExpertCounts:
    return ExpertCounts(
        hits=one.hits + other.hits,
        late=one.late + other.late,
        misses=one.misses + other.misses,
    )


def _add_stats(one: StepStats, other: StepStats) -> StepStats:
    """Shards load side by side and wait for each other, so the slowest one's times count. Their
    predictors see and say the same, so the first one's numbers stand.
    """
    return msgspec.structs.replace(
        one,
        seconds=max(one.seconds, other.seconds),
        stall_seconds=max(one.stall_seconds, other.stall_seconds),
        bytes_on_demand=one.bytes_on_demand + other.bytes_on_demand,
        bytes_prefetched=one.bytes_prefetched + other.bytes_prefetched,
        bytes_prefetch_used=one.bytes_prefetch_used + other.bytes_prefetch_used,
        bytes_prefetch_wasted=one.bytes_prefetch_wasted + other.bytes_prefetch_wasted,
        hits=one.hits + other.hits,
        late=one.late + other.late,
        misses=one.misses + other.misses,
    )
