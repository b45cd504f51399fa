from collections.abc import Callable

import msgspec

from fmoe_ray.engine.messages import ExpertCounts, RowResult, StepResult, StepStats
from fmoe_ray.engine.shard_results import merge_results

Replace = Callable[..., StepResult]
replace: Replace = msgspec.structs.replace


def result(factor: int, token: int | None) -> StepResult:
    stats = StepStats(
        seconds=0.1 * factor,
        stall_seconds=0.01 * factor,
        bytes_on_demand=100 * factor,
        bytes_prefetched=10 * factor,
        hits=3 * factor,
        late=2 * factor,
        misses=factor,
        bytes_prefetch_used=6 * factor,
        bytes_prefetch_wasted=4 * factor,
        num_predictions=8,
        num_maps=50,
    )
    experts = ExpertCounts(hits=3 * factor, late=2 * factor, misses=factor)
    rows = [RowResult(request_id=7, token=token, experts=experts, logprob=-0.5)]
    return StepResult(step=4, rows=rows, stats=stats, routing_checksum=99)


def test_one_shard_speaks_for_itself() -> None:
    assert merge_results([result(1, 5)]) == result(1, 5)


def test_the_tokens_are_the_first_shards_and_the_experts_are_everyones() -> None:
    merged = merge_results([result(1, 5), result(4, None), result(2, None)])
    (row,) = merged.rows
    assert (row.token, row.logprob) == (5, -0.5)
    assert row.experts == ExpertCounts(hits=21, late=14, misses=7)
    assert (merged.stats.bytes_on_demand, merged.stats.bytes_prefetched) == (700, 70)
    assert (merged.stats.bytes_prefetch_used, merged.stats.bytes_prefetch_wasted) == (42, 28)
    assert (merged.stats.num_predictions, merged.stats.num_maps) == (8, 50)
    assert (merged.stats.hits, merged.stats.late, merged.stats.misses) == (21, 14, 7)
    assert (merged.stats.seconds, merged.stats.stall_seconds) == (0.4, 0.04)


def test_shards_that_chose_different_experts_fail_the_step() -> None:
    merged = merge_results(
        [result(1, 5), result(1, None), replace(result(1, None), routing_checksum=98)]
    )
    assert merged.rows == []
    assert "step 4: shards 0 and 2 chose different experts" in str(merged.error)


def test_a_step_that_failed_on_one_shard_failed() -> None:
    merged = merge_results([result(1, 5), replace(result(1, None), rows=[], error="no memory")])
    assert merged.rows == []
    assert merged.error == "shard 1: no memory"
