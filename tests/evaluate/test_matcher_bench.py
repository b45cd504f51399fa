"""The matcher's bench at a small size: speed as a ratio within one run, on idle cores."""

import pytest

from fmoe_ray.evaluate.matcher_bench import MatcherCase, bench_matcher


@pytest.mark.slow
def test_the_incremental_search_is_at_least_20_times_faster_than_a_full_recomputation() -> None:
    timing = bench_matcher(MatcherCase(capacity=4_000, num_columns=8), iterations=2)
    assert timing.speedup >= 20
