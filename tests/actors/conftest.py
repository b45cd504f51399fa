"""One cluster for all tests of actors: starting it costs more than the tests."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A local cluster with Serve; yields the base URL of its proxy."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="fmoe")  # short: sockets in it may have 107 bytes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=4,  # logical: two applications at a time
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _temp_dir=folder,
        _system_config={"metrics_report_interval_ms": 500},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
