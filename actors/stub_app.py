"""The application over a stub on a cluster of its own, for measurements: no model, one machine."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve

from fmoe_ray.actors.replica import ReplicaDeployment
from fmoe_ray.actors.resources import placement_options
from fmoe_ray.config import ModelSettings, ServerSettings, Settings
from fmoe_ray.engine.stub_runner import StubBackend


@contextmanager
def stub_app(num_streams: int, server: ServerSettings) -> Iterator[str]:
    """Yields the base URL behind Serve's proxy. The cluster ends with it."""
    settings = Settings(model=ModelSettings(device="cpu"), server=server)
    folder = tempfile.mkdtemp(prefix="fmoe")  # short: sockets in it may have 107 bytes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _temp_dir=folder,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        replica = ReplicaDeployment.options(
            **placement_options(settings), max_ongoing_requests=num_streams
        )
        serve.run(replica.bind(settings, StubBackend(num_slots=num_streams)), name="stub")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
