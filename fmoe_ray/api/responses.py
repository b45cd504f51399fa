"""Sends an answer, whole or as server-sent events, and cancels it when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fmoe_ray.api.calls import Call
from fmoe_ray.api.errors import error_body, error_response
from fmoe_ray.errors import FmoeError

_encode = msgspec.json.Encoder().encode


class AnswerResponse(Response):
    """Owns the call from here on: whatever happens, it is closed.

    Nothing is sent before the first event or `keep_alive_s`, so that an early failure has its
    proper HTTP status; after that a failure is an `error` event and the stream has no [DONE].
    """

    def __init__(self, call: Call, *, keep_alive_s: float) -> None:
        super().__init__()
        self._call = call
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_answer = self._send_events if self._call.job.streams else self._send_whole
        with self._call.stream:
            await _until_disconnect(send_answer(scope, receive, send), receive)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(_encode(await self._call.whole()), media_type="application/json")
        except FmoeError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks = self._call.chunks(self._keep_alive_s)
        try:
            first = await anext(chunks)
        except FmoeError as error:
            await error_response(error)(scope, receive, send)
            return
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies would collect the events
        del self.headers["content-length"]
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for part in _events(first, chunks):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(
    first: dict[str, Any] | None, later: AsyncIterator[dict[str, Any] | None]
) -> AsyncIterator[bytes]:
    yield _sse(first)
    try:
        async for chunk in later:
            yield _sse(chunk)
    except FmoeError as error:
        yield _sse(error_body(error))
    else:
        yield b"data: [DONE]\n\n"


def _sse(body: dict[str, Any] | None) -> bytes:
    return b": keep-alive\n\n" if body is None else b"data: " + _encode(body) + b"\n\n"


async def _until_disconnect(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    sender = asyncio.ensure_future(sending)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = sender.done()
        sender.cancel()
        watcher.cancel()
        await asyncio.gather(sender, watcher, return_exceptions=True)
    if is_done:
        sender.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
