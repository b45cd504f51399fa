"""The streaming benchmark counts what it reads."""

from fmoe_ray.config import ServerSettings
from fmoe_ray.evaluate.stream_bench import bench_stream


def test_all_tokens_of_all_streams_arrive() -> None:
    report = bench_stream(num_streams=3, tokens_per_stream=50, settings=ServerSettings())
    assert report.num_tokens == 150
    assert 3 <= report.num_chunks <= 150
    assert report.tokens_per_s == report.num_tokens / report.seconds > 0
    assert report.server_us_per_token is not None and report.server_us_per_token > 0
