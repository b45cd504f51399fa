"""A stream without tokens stays open, and then cannot change its status any more."""

import asyncio
from typing import Any

from fmoe_ray.api.app import create_app
from fmoe_ray.api.stub_server import stub_service
from fmoe_ray.config import ServerSettings
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.stub_runner import StubRunner
from fmoe_ray.errors import EngineError


class SlowRunner(StubRunner):
    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.error: EngineError | None = None

    async def step(self, plan: StepPlan) -> StepResult:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().step(plan)


async def stream_lines(runner: SlowRunner) -> tuple[int, list[str]]:
    """Opens the gate after the second comment. ASGI by hand: httpx collects a stream's parts."""
    body = b'{"model": "tiny", "prompt": "w", "temperature": 0, "stream": true}'
    sent: list[dict[str, Any]] = []
    received = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            runner.gate.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    async with asyncio.timeout(10):
        async with stub_service(runner, server=ServerSettings(keep_alive_s=0.01)) as service:
            await create_app(service)(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent).decode()
    return sent[0]["status"], [line for line in text.split("\n") if line]


def test_comments_keep_a_silent_stream_open() -> None:
    async def run() -> None:
        status, lines = await stream_lines(SlowRunner())
        assert status == 200
        assert lines[:2] == [": keep-alive"] * 2
        assert lines[-1] == "data: [DONE]"

    asyncio.run(run())


def test_a_failure_after_a_comment_is_an_error_event() -> None:
    async def run() -> None:
        runner = SlowRunner()
        runner.error = EngineError("the device is gone")
        status, lines = await stream_lines(runner)
        assert status == 200
        assert "the device is gone" in lines[-1] and "error" in lines[-1]
        assert "data: [DONE]" not in lines

    asyncio.run(run())
