"""How many tokens a second get through HTTP: scheduler, server and client, without a model."""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import httpx
import msgspec

from fmoe_ray.config import ServerSettings
from fmoe_ray.errors import EngineError

_START_TIMEOUT_S = 60.0
_READ_TIMEOUT_S = 60.0
_PROCESSOR_TIME = "processor time"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    num_streams: int
    num_tokens: int
    num_chunks: int
    """Server-sent events: below the tokens where tokens waited for their reader or each other."""
    seconds: float
    server_us_per_token: float | None
    """Processor time of the server: other processes on this machine do not disturb it. None where
    it is not ours to ask."""
    first_token_ms: float
    """Median over the streams, all of them begun at once."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def bench_stream(
    *, num_streams: int, tokens_per_stream: int, settings: ServerSettings
) -> StreamReport:
    """Runs the server in a process of its own and reads all streams from this one.

    Raises EngineError if the server does not start or a stream is incomplete.
    """
    with _server(num_streams, settings) as (url, processor_time_s):
        before_s = 0.0

        def warmed_up() -> None:
            nonlocal before_s
            before_s = processor_time_s()

        report = bench_url(
            url, num_streams=num_streams, tokens_per_stream=tokens_per_stream, on_begin=warmed_up
        )
        used_s = processor_time_s() - before_s
    return replace(report, server_us_per_token=used_s / report.num_tokens * 1e6)


def bench_url(
    url: str,
    *,
    num_streams: int,
    tokens_per_stream: int,
    on_begin: Callable[[], None] = lambda: None,
) -> StreamReport:
    """Reads all streams of a stub's server from this process. Raises EngineError if a stream is
    incomplete.
    """
    asyncio.run(_read_all(url, 1, 16))  # imports what is imported late
    on_begin()
    streams, seconds = asyncio.run(_read_all(url, num_streams, tokens_per_stream))
    num_tokens = sum(stream.num_tokens for stream in streams)
    return StreamReport(
        num_streams=num_streams,
        num_tokens=num_tokens,
        num_chunks=sum(stream.num_chunks for stream in streams),
        seconds=seconds,
        server_us_per_token=None,
        first_token_ms=statistics.median(stream.first_token_s for stream in streams) * 1e3,
    )


@contextmanager
def _server(
    num_streams: int, settings: ServerSettings
) -> Iterator[tuple[str, Callable[[], float]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, num_streams, settings), daemon=True)
    process.start()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise EngineError(f"the server did not start within {_START_TIMEOUT_S:g} s")
        yield ours.recv(), lambda: _ask_processor_time(ours)
    finally:
        ours.send(None)
        process.join(_START_TIMEOUT_S)


def _serve(connection: Connection, num_streams: int, settings: ServerSettings) -> None:
    from fmoe_ray.api.stub_server import stub_server
    from fmoe_ray.engine.stub_runner import StubRunner

    runner = StubRunner(num_slots=num_streams, max_context=2**20)
    with stub_server(runner, settings) as url:
        connection.send(url)
        while connection.recv() == _PROCESSOR_TIME:
            connection.send(time.process_time())


def _ask_processor_time(connection: Connection) -> float:
    connection.send(_PROCESSOR_TIME)
    if not connection.poll(_START_TIMEOUT_S):
        raise EngineError(f"the server was silent for {_START_TIMEOUT_S:g} s")
    seconds = connection.recv()
    assert isinstance(seconds, float)
    return seconds


async def _read_all(
    url: str, num_streams: int, tokens_per_stream: int
) -> tuple[list["_Stream"], float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_READ_TIMEOUT_S, limits=limits) as client:
        began = time.perf_counter()
        reads = [_read(client, tokens_per_stream) for _ in range(num_streams)]
        streams = await asyncio.gather(*reads)
        return streams, time.perf_counter() - began


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    num_tokens: int
    num_chunks: int
    first_token_s: float


async def _read(client: httpx.AsyncClient, num_tokens: int) -> _Stream:
    body = {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_token_s = time.perf_counter(), 0.0
    received = bytearray()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for part in response.aiter_raw():
            first_token_s = first_token_s or time.perf_counter() - began
            received += part
    events = [line.removeprefix(b"data: ") for line in received.split(b"\n\n") if line]
    if events[-1] != b"[DONE]":
        raise EngineError(f"a stream ended with {events[-1][:200]!r}")
    usage = msgspec.json.decode(events[-2])["usage"]
    if usage["completion_tokens"] != num_tokens:
        raise EngineError(f"{usage['completion_tokens']} of {num_tokens} tokens arrived")
    return _Stream(num_tokens=num_tokens, num_chunks=len(events) - 2, first_token_s=first_token_s)
