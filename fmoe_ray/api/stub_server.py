"""The API over the stub runner, for tests and streaming benchmarks: no model, no Ray."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from fmoe_ray.api.app import create_app
from fmoe_ray.api.metrics import PrometheusObserver
from fmoe_ray.api.service import Service
from fmoe_ray.config import EngineSettings, ServerSettings
from fmoe_ray.engine.engine import Engine
from fmoe_ray.engine.runner import Runner
from fmoe_ray.engine.stub_runner import StubRunner, StubTokenizer

_LIMIT_S = 10.0


@asynccontextmanager
async def stub_service(
    runner: Runner | None = None,
    engine: EngineSettings | None = None,
    server: ServerSettings | None = None,
) -> AsyncIterator[Service]:
    """A running service for `create_app`, whose engine is checked when it closes."""
    metrics = PrometheusObserver()
    async with Engine(
        runner or StubRunner(num_slots=4, max_context=256),
        StubTokenizer(),
        engine or EngineSettings(),
        observers=(metrics,),
    ) as running:
        yield Service(
            engine=running,
            model_name="tiny",
            replica="stub",
            settings=server or ServerSettings(),
            metrics=metrics,
            started_at=1,
        )
        running.check_integrity()


@contextmanager
def stub_server(
    runner: Runner | None = None, server: ServerSettings | None = None
) -> Iterator[str]:
    """A real server on a free port, in a thread; yields its base URL."""
    ready, stop = threading.Event(), threading.Event()
    ports: list[int] = []

    async def run() -> None:
        async with stub_service(runner, server=server) as service:
            config = uvicorn.Config(create_app(service), port=0, log_level="warning")
            web = uvicorn.Server(config)
            serving = asyncio.create_task(web.serve())
            while not web.started and not serving.done():
                await asyncio.sleep(0.01)
            ports.append(web.servers[0].sockets[0].getsockname()[1])
            ready.set()
            await asyncio.to_thread(stop.wait)
            web.should_exit = True
            await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(_LIMIT_S), "the server did not start"
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        stop.set()
        thread.join(_LIMIT_S)
        assert not thread.is_alive(), "the server did not stop"
