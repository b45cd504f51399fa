"""Clients without HTTP: through a handle in the cluster, and over `ray://` from outside."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fmoe_ray import AsyncClient, Client
from fmoe_ray.config import load_settings
from fmoe_ray.engine.stub_runner import StubBackend
from fmoe_ray.errors import ConfigError, InvalidRequestError, ModelNotFoundError, UnavailableError

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "hi"}]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
OVER_RAY = Path(__file__).parent / "over_ray.py"


@pytest.fixture(scope="module")
def handle(cluster: str) -> Iterator[Any]:
    from ray import serve

    from fmoe_ray.actors.app import build_with

    application = build_with(
        load_settings(ROOT / "configs" / "tiny.yaml"), StubBackend(step_s=0.005)
    )
    yield serve.run(application, name="clients", route_prefix="/clients")
    serve.delete("clients")


def within(seconds: float, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.02)


def num_running(handle: Any) -> int:
    health: dict[str, int] = handle.health.remote().result(timeout_s=10)
    return health["num_running"]


def test_a_handle_answers_whole_and_as_a_stream(handle: Any) -> None:
    with Client(handle) as client:
        assert client.models() == ["tiny"]
        answer = client.chat(HELLO, temperature=0)
        assert (answer.text, answer.finish_reason) == (ALPHABET, "stop")
        assert answer.usage["fmoe"]["misses"] == 9 + 26
        pieces = list(client.complete("x", stream=True, temperature=0))
        assert "".join(piece.text for piece in pieces) == "yz"
        assert pieces[-1].usage is not None and pieces[-1].usage["completion_tokens"] == 3


def test_errors_come_through_a_handle_as_they_are(handle: Any) -> None:
    with Client(handle) as client:
        with pytest.raises(InvalidRequestError, match="max_tokens") as caught:
            client.chat(HELLO, max_tokens=-1)
        assert caught.value.param == "max_tokens"
        with pytest.raises(InvalidRequestError, match="temperature"):
            list(client.chat(HELLO, stream=True, temperature=9))
    with Client(handle, model="other") as client, pytest.raises(ModelNotFoundError):
        client.chat(HELLO)


def test_closing_a_stream_of_a_handle_frees_the_slot(handle: Any) -> None:
    with Client(handle) as client:
        stream = client.chat(HELLO, stream=True, ignore_eos=True)
        next(stream)
        assert num_running(handle) == 1
        stream.close()  # type: ignore[attr-defined]
    within(5, lambda: num_running(handle) == 0)


@pytest.fixture(scope="module")
def slow(cluster: str) -> Iterator[Any]:
    """The handle of a replica that needs a second for every token."""
    from ray import serve

    from fmoe_ray.actors.app import build_with

    application = build_with(load_settings(ROOT / "configs" / "tiny.yaml"), StubBackend(step_s=1.0))
    yield serve.run(application, name="slow", route_prefix="/slow")
    serve.delete("slow")


def whole(client: Client) -> None:
    client.chat(HELLO, ignore_eos=True)


def streamed(client: Client) -> None:
    list(client.chat(HELLO, stream=True, ignore_eos=True))


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_call_that_times_out_ends_and_frees_the_slot(
    ask: Callable[[Client], None], slow: Any
) -> None:
    with Client(slow, timeout_s=0.5, model="tiny") as client:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="no answer in time"):
            ask(client)
        assert time.monotonic() - began < 5
    within(8, lambda: num_running(slow) == 0)


async def whole_later(client: AsyncClient) -> None:
    await client.chat(HELLO, ignore_eos=True)


async def streamed_later(client: AsyncClient) -> None:
    async for _ in await client.chat(HELLO, stream=True, ignore_eos=True):
        pass


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("ask", [whole_later, streamed_later])
def test_an_awaited_call_that_times_out_or_is_cancelled_frees_the_slot(
    ask: Callable[[AsyncClient], Awaitable[None]], is_cancelled: bool, slow: Any
) -> None:
    async def run() -> None:
        limit_s = 60.0 if is_cancelled else 0.5
        async with AsyncClient(slow, timeout_s=limit_s, model="tiny") as client:
            with pytest.raises(TimeoutError if is_cancelled else UnavailableError):
                async with asyncio.timeout(0.5 if is_cancelled else 5):
                    await ask(client)

    asyncio.run(run())
    within(8, lambda: num_running(slow) == 0)


def test_the_async_client_streams_through_a_handle(handle: Any) -> None:
    async def ask() -> None:
        async with AsyncClient(handle) as client:
            assert (await client.chat(HELLO, temperature=0)).text == ALPHABET
            streams = [await client.chat(HELLO, stream=True, temperature=0) for _ in range(3)]
            texts = ["".join([piece.text async for piece in stream]) for stream in streams]
            assert texts == [ALPHABET] * 3
            abandoned = await client.chat(HELLO, stream=True, ignore_eos=True)
            await anext(abandoned)
            await abandoned.aclose()  # type: ignore[attr-defined]

    asyncio.run(ask())
    within(5, lambda: num_running(handle) == 0)


def test_the_handle_example_runs(handle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(
        "handle_client", ROOT / "examples" / "handle_client.py"
    )
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main("clients")
    assert capsys.readouterr().out.count(ALPHABET) == 2


@pytest.fixture(scope="module")
def ray_address(handle: Any) -> Iterator[str]:
    """A server for Ray clients, as `ray start --head` has one."""
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gcs = ray.get_runtime_context().gcs_address
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--mode", "legacy", "--address", gcs]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.util.client.server", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        within(30, lambda: process.poll() is None and _is_open(port))
        yield f"ray://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_over_ray_everything_is_the_same(ray_address: str, handle: Any) -> None:
    """In a process of its own: this one is part of the cluster already."""
    done = subprocess.run(
        [sys.executable, str(OVER_RAY), ray_address, "clients"],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    within(5, lambda: num_running(handle) == 0)


def test_what_leads_nowhere_is_refused(handle: Any) -> None:
    for target, message in (
        ("127.0.0.1:8000", "no address of a server"),
        (42, "neither an address nor the handle"),
        ("ray://127.0.0.1:1", "part of a cluster already"),
    ):
        with pytest.raises(ConfigError, match=message):
            Client(target)
    with pytest.raises(ConfigError, match="application"):
        Client("http://127.0.0.1:1", application="clients")
    with pytest.raises(ConfigError, match="api_key"):
        Client(handle, api_key="secret")
