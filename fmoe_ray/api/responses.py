"""Sends an answer, whole or as server-sent events, and cancels it when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fmoe_ray.api.errors import error_body, error_response
from fmoe_ray.api.jobs import Job
from fmoe_ray.engine.request import Event, Usage
from fmoe_ray.engine.stream import EventStream

_encode = msgspec.json.Encoder().encode


class AnswerResponse(Response):
    """Owns the stream from here on: whatever happens, it is closed.

    Nothing is sent before the first event or `keep_alive_s`, so that an early failure has its
    proper HTTP status; after that a failure is an `error` event and the stream has no [DONE].
    """

    def __init__(self, job: Job, stream: EventStream, *, keep_alive_s: float) -> None:
        super().__init__()
        self._job = job
        self._stream = stream
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_answer = self._send_events if self._job.streams else self._send_whole
        with self._stream:
            await _until_disconnect(send_answer(scope, receive, send), receive)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        events: dict[int, Event] = {}
        async for event in self._stream:
            if event.error is not None:
                await error_response(event.error)(scope, receive, send)
                return
            whole = events.setdefault(event.index, event)
            if whole is not event:
                whole.absorb(event)
        body = self._job.answer.whole([events[index] for index in sorted(events)])
        await Response(_encode(body), media_type="application/json")(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._stream.next_within(self._keep_alive_s)
        if first is not None and first.error is not None:
            await error_response(first.error)(scope, receive, send)
            return
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies would collect the events
        del self.headers["content-length"]
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for part in self._parts(first):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self, event: Event | None) -> AsyncIterator[bytes]:
        usages: list[Usage] = []
        while True:
            if event is None:
                yield b": keep-alive\n\n"
            elif event.error is not None:
                yield _sse(error_body(event.error))
                return
            else:
                if event.usage is not None:
                    usages.append(event.usage)
                yield _sse(self._job.answer.chunk(event))
            if self._stream.is_over:
                break
            event = await self._stream.next_within(self._keep_alive_s)
        if self._job.includes_usage:
            yield _sse(self._job.answer.usage_chunk(usages))
        yield b"data: [DONE]\n\n"


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


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
