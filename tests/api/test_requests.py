"""Bad requests get a named error in OpenAI's shape, and the server goes on."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from fmoe_ray.api.app import create_app
from fmoe_ray.api.stub_server import stub_service
from fmoe_ray.config import EngineSettings, ServerSettings
from fmoe_ray.engine.stub_runner import StubRunner

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def send(
    method: str,
    path: str,
    *,
    content: bytes | None = None,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    server: ServerSettings | None = None,
    engine: EngineSettings | None = None,
) -> httpx.Response:
    """One request to a fresh application; a good one after it must succeed."""

    async def run() -> httpx.Response:
        async with stub_service(server=server, engine=engine) as service:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                raw = json.dumps(body).encode() if body is not None else content
                response = await client.request(method, path, content=raw, headers=headers)
                good = await client.post(
                    CHAT,
                    json={"model": "tiny", "messages": HELLO, "temperature": 0},
                    headers={"authorization": "Bearer good"},
                )
                assert good.json()["choices"][0]["message"]["content"].startswith("abc")
                return response

    return asyncio.run(run())


def refused(status: int, param: str | None, response: httpx.Response) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["param"]) == (status, param), error
    assert isinstance(error["type"], str)
    message = error["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000])
def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    assert "body" in refused(400, None, send("POST", CHAT, content=content))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ({"model": 3}, "model"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"user": "me"}, "user"),
        ({"minimum_tokens": 3}, "minimum_tokens"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": HELLO, **fields}
    engine = EngineSettings(max_waiting=2)
    response = send("POST", CHAT, body=body, engine=engine)
    assert param in refused(400, param, response)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": "a" * 256}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "prompt": "a", **fields}
    refused(400, param, send("POST", COMPLETIONS, body=body))


def test_fields_without_effect_are_accepted_at_their_neutral_values() -> None:
    neutral: dict[str, Any] = {
        "frequency_penalty": 0.0,
        "presence_penalty": None,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "n": 1,
        "stop": None,
        "user": None,
    }
    response = send("POST", CHAT, body={"model": "tiny", "messages": HELLO, **neutral})
    assert response.status_code == 200


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO}
    del body[field]
    assert refused(400, field, send("POST", CHAT, body=body)) == f"{field} is required"


def test_an_unknown_model_is_404_and_names_the_one_that_is_served() -> None:
    message = refused(404, "model", send("POST", CHAT, body={"model": "x", "messages": HELLO}))
    assert "'tiny'" in message
    refused(404, "model", send("GET", "/v1/models/x"))


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v2", 404), ("GET", CHAT, 405), ("PUT", CHAT, 405)]
)
def test_unknown_paths_and_methods_have_an_error_body(method: str, path: str, status: int) -> None:
    assert path in refused(status, None, send(method, path))


@pytest.mark.parametrize("header", [None, "Bearer bad", "good", "Bearer ", "Bearer göod"])
def test_without_an_accepted_key_nothing_is_served(header: str | None) -> None:
    server = ServerSettings(api_keys=("other", "good"))
    headers = {} if header is None else {"authorization": header}
    for content in (b"{", json.dumps({"model": "tiny", "messages": HELLO}).encode()):
        sent = {name: value.encode() for name, value in headers.items()}
        response = send("POST", CHAT, content=content, headers=sent, server=server)  # type: ignore[arg-type]
        assert "Authorization" in refused(401, None, response)


@pytest.mark.parametrize("prefix", ["/stub", "/v1", "/a/b"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_key_is_asked_for_under_every_route_prefix(prefix: str, method: str) -> None:
    """Serve keeps the prefix in the path, and names it as the root path."""

    async def run() -> None:
        async with stub_service(server=ServerSettings(api_keys=("good",))) as service:
            transport = httpx.ASGITransport(create_app(service), root_path=prefix)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                path = prefix + (CHAT if method == "POST" else "/v1/models")
                fields = {"model": "tiny", "messages": HELLO} if method == "POST" else None
                refused(401, None, await client.request(method, path, json=fields))
                key = {"authorization": "Bearer good"}
                good = await client.request(method, path, json=fields, headers=key)
                assert good.status_code == 200

    asyncio.run(run())


def test_health_and_metrics_need_no_key() -> None:
    server = ServerSettings(api_keys=("good",))
    assert send("GET", "/health", server=server).status_code == 200
    assert send("GET", "/metrics", server=server).status_code == 200


def test_overload_is_429_with_the_time_to_wait() -> None:
    async def run() -> None:
        runner = StubRunner(num_slots=1, step_s=0.01)
        async with stub_service(runner, EngineSettings(max_waiting=0)) as service:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
                both = await asyncio.gather(*[client.post(CHAT, json=body) for _ in range(2)])
        good, refusal = sorted(both, key=lambda response: response.status_code)
        assert good.status_code == 200
        assert "engine.max_waiting" in refused(429, None, refusal)
        assert refusal.headers["retry-after"] == "1"

    asyncio.run(run())


def test_a_deadline_is_408() -> None:
    async def run() -> httpx.Response:
        settings = EngineSettings(request_timeout_s=0.02)
        async with stub_service(StubRunner(step_s=0.01), settings) as service:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(CHAT, json={"model": "tiny", "messages": HELLO})

    assert "request_timeout_s" in refused(408, None, asyncio.run(run()))


def test_health_says_which_replica_and_how_it_goes() -> None:
    body = send("GET", "/health").json()
    assert (body["status"], body["replica"], body["num_running"]) == ("ok", "stub", 0)


def test_metrics_count_what_was_served() -> None:
    async def run() -> str:
        async with stub_service() as service:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"model": "tiny", "prompt": "w", "temperature": 0}
                await client.post(COMPLETIONS, json=body)
                return (await client.get("/metrics")).text

    lines = asyncio.run(run()).splitlines()
    for line in (
        'fmoe_requests_total{finish_reason="stop"} 1',
        "fmoe_generated_tokens_total 4",
        'fmoe_experts_total{result="miss"} 4',
        'fmoe_bytes_total{cause="on_demand"} 4096',
        'fmoe_ttft_seconds_bucket{le="+Inf"} 1',
        "fmoe_tpot_seconds_count 1",
        "fmoe_requests_running 0",
    ):
        assert line in lines
