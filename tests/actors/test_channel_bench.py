"""The benchmark of the channel times what it says."""

from fmoe_ray.actors.channel_bench import bench_channel


def test_a_step_through_two_shards_takes_some_time() -> None:
    times = bench_channel(num_shards=2, num_rows=3, num_steps=20)
    assert (times.transport, times.num_shards, times.num_rows) == ("tcp", 2, 3)
    assert 0 < times.p10_us <= times.median_us <= times.p90_us
