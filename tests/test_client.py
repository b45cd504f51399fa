"""Both clients against a real server over the stub: answers, streams, errors."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from fmoe_ray.api.stub_server import stub_server
from fmoe_ray.client import AsyncClient, Client
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.stub_runner import StubRunner
from fmoe_ray.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ShardLostError,
    UnavailableError,
)

HELLO = [{"role": "user", "content": "hi"}]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub_server() as url:
        yield url


def test_an_answer_has_text_reason_and_expert_statistics(url: str) -> None:
    with Client(url) as client:
        answer = client.chat(HELLO, temperature=0)
        assert (answer.text, answer.finish_reason) == (ALPHABET, "stop")
        assert answer.usage["fmoe"]["misses"] == 9 + 26
        assert client.complete("v", temperature=0, max_tokens=2).text == "wx"
        assert client.models() == ["tiny"]


def test_a_stream_adds_up_to_the_answer_and_ends_with_its_cost(url: str) -> None:
    with Client(url) as client:
        pieces = list(client.chat(HELLO, stream=True, temperature=0))
        assert "".join(piece.text for piece in pieces) == ALPHABET
        assert [p.finish_reason for p in pieces if p.finish_reason] == ["stop"]
        assert pieces[-1].usage is not None and pieces[-1].usage["completion_tokens"] == 27
        pieces = list(client.complete([ord("x")], stream=True, temperature=0))
        assert "".join(piece.text for piece in pieces) == "yz"


def test_the_async_client_says_the_same(url: str) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client:
            assert (await client.chat(HELLO, temperature=0)).text == ALPHABET
            pieces = [p async for p in await client.complete("x", stream=True, temperature=0)]
            assert "".join(piece.text for piece in pieces) == "yz"
            with pytest.raises(InvalidRequestError):
                await client.chat([])

    asyncio.run(run())


def test_closing_a_stream_cancels_the_request(url: str) -> None:
    with Client(url) as client:
        stream = client.chat(HELLO, stream=True, ignore_eos=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    for _ in range(200):
        if httpx.get(f"{url}/health").json()["num_running"] == 0:
            return
    raise AssertionError("the request still runs")


def test_errors_of_the_server_are_those_of_the_package(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(InvalidRequestError, match="max_tokens") as caught:
            client.chat(HELLO, max_tokens=-1)
        assert (caught.value.param, caught.value.status) == ("max_tokens", 400)
        with pytest.raises(InvalidRequestError, match="temperature"):
            list(client.chat(HELLO, stream=True, temperature=9))
    with Client(url, model="other") as client, pytest.raises(ModelNotFoundError, match="'tiny'"):
        client.chat(HELLO)


def test_several_answers_are_refused_instead_of_dropping_all_but_one(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(InvalidRequestError, match="send 2 requests, or use the openai") as n:
            client.chat(HELLO, n=2)
        assert n.value.param == "n"
        with pytest.raises(InvalidRequestError, match="send 2 requests"):
            client.chat(HELLO, n=2, stream=True)
        with pytest.raises(InvalidRequestError, match="prompt: 2 prompts"):
            client.complete(["a", "b"])  # type: ignore[list-item]
        assert client.chat(HELLO, n=1, temperature=0).text == ALPHABET

    async def run() -> None:
        async with AsyncClient(url) as client:
            with pytest.raises(InvalidRequestError, match="send 2 requests"):
                await client.complete("a", n=2, stream=True)

    asyncio.run(run())


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
def test_an_address_as_openais_clients_take_it_works(url: str, suffix: str) -> None:
    with Client(url + suffix) as client:
        assert client.chat(HELLO, temperature=0).text == ALPHABET


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), float("inf")])
def test_a_time_out_that_is_none_is_a_wrong_setting(timeout_s: float) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=f"timeout_s {timeout_s}: give seconds above 0"):
            client("http://127.0.0.1:1", timeout_s=timeout_s)


def test_nobody_there_is_an_unavailable_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}: the connection failed"):
            client.chat(HELLO)
    with Client(f"http://127.0.0.1:{port}", model="tiny") as client:
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}: the connection failed"):
            list(client.chat(HELLO, stream=True))


def test_an_error_event_in_a_stream_raises() -> None:
    class Dying(StubRunner):
        async def step(self, plan: StepPlan) -> StepResult:
            if plan.step == 3:
                raise ShardLostError("shard 0 died")
            return await super().step(plan)

    with stub_server(Dying()) as url, Client(url) as client:
        text = ""
        with pytest.raises(UnavailableError, match="shard 0 died"):
            for piece in client.complete("a", stream=True, temperature=0):
                text += piece.text
        assert "bc".startswith(text)


_LENGTH = b"content-length:"


@contextmanager
def server_that_says(answer: bytes) -> Iterator[str]:
    """Sends `answer` to one connection and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                with connection.makefile("rb") as request:  # all of it: closing on a rest resets
                    head = iter(request.readline, b"\r\n")
                    lengths = [int(line[15:]) for line in head if line.lower()[:15] == _LENGTH]
                    request.read(sum(lengths))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_a_stream_without_its_end_raises() -> None:
    event = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    with server_that_says(head + event) as url, Client(url, model="tiny") as client:
        pieces = client.complete("a", stream=True)
        assert next(pieces).text == "a"
        with pytest.raises(UnavailableError, match="broke off"):
            next(pieces)


@pytest.mark.parametrize(
    ("headers", "content", "words", "wait_s"),
    [
        ("retry-after: 7\r\n", b'{"error": {"message": "busy"}}', "busy", 7.0),
        ("retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n", b'{"error": "busy"}', "busy", 0.0),
        ("retry-after: soon\r\n", b'{"error": {"code": 3}}', "code", 1.0),
        ("retry-after: nan\r\n", b'["busy"]', "busy", 1.0),
        ("", b'{"detail": "busy"}', "busy", 1.0),
    ],
)
def test_an_error_in_any_form_keeps_its_words_and_wait(
    headers: str, content: bytes, words: str, wait_s: float
) -> None:
    head = f"HTTP/1.1 429 Too Many Requests\r\n{headers}content-length: {len(content)}\r\n\r\n"
    with server_that_says(head.encode() + content) as url, Client(url, model="tiny") as client:
        with pytest.raises(OverloadedError, match=words) as caught:
            client.complete("a")
    assert caught.value.retry_after_s == wait_s


def test_a_proxys_own_words_are_kept() -> None:
    answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy"
    with server_that_says(answer) as url, Client(url, model="tiny") as client:
        with pytest.raises(UnavailableError, match="busy"):
            client.complete("a")
