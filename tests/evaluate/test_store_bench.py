"""The map store's bench at a small size: never a timing, always what the limits are made of."""

import pytest

from fmoe_ray.evaluate.store_bench import Machine, StoreCase, bench_store


def test_limits_are_the_products_operations_and_one_read_of_the_store_for_all_maps() -> None:
    case = StoreCase(
        model="small", num_layers=3, num_experts=5, embedding_size=7, capacity=70, batch=4
    )
    timing = bench_store(case, Machine(gflops=2.0, read_gbps=0.5), rounds=2)
    num_products = (3 * 5 + 7) * 70
    assert timing.compute_limit_ms == pytest.approx(2 * num_products / 2.0e9 * 1e3)
    assert timing.memory_limit_ms == pytest.approx(2 * num_products / 4 / 0.5e9 * 1e3)
    assert min(timing.together_ms, timing.alone_ms, timing.product_ms) > 0
    assert timing.over_limit == timing.together_ms / timing.compute_limit_ms
