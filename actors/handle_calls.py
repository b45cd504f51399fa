"""The API without HTTP: what `Client(handle)` and `Client("ray://...")` call on a replica.

Bodies are those of the HTTP API. Whoever can make these calls is inside the cluster: no API key is
asked for.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from fmoe_ray.api.body import parse_body
from fmoe_ray.api.calls import Call, begin
from fmoe_ray.api.schemas import ChatCompletionRequest, CompletionRequest
from fmoe_ray.api.service import Service
from fmoe_ray.errors import FmoeError, UnavailableError

Body = dict[str, Any]
_BODY_TYPES: dict[str, type[ChatCompletionRequest | CompletionRequest]] = {
    "chat/completions": ChatCompletionRequest,
    "completions": CompletionRequest,
}


class HandleCalls:
    """A replica's methods for Serve handles. They raise the exceptions of this package."""

    mailbox_timeout_s = 30.0
    _service: Service

    async def models(self) -> list[str]:
        return [self._service.model_name]

    async def health(self) -> dict[str, Any]:
        return asdict(self._service.engine.health())

    async def chat(self, body: Body) -> Body:
        return await self._whole("chat/completions", body)

    async def complete(self, body: Body) -> Body:
        return await self._whole("completions", body)

    async def stream_chat(self, body: Body) -> AsyncIterator[Body | None]:
        """None now and then while there is nothing to say. With `handle.options(stream=True)`."""
        async for chunk in self._chunks("chat/completions", body):
            yield chunk

    async def stream_complete(self, body: Body) -> AsyncIterator[Body | None]:
        async for chunk in self._chunks("completions", body):
            yield chunk

    async def push(self, endpoint: str, body: Body, mailbox: Any, stream: int) -> None:
        """Sends a stream to a `Mailbox`, errors included. Raises UnavailableError if the mailbox
        takes nothing: the request ends, and its KV slot is free.
        """
        async with aclosing(self._chunks(endpoint, body)) as chunks:
            end: FmoeError | None = None
            while True:
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                except FmoeError as error:
                    end = error
                    break
                # Tokens that come while this waits are in the next chunk: the engine joins them.
                if not await self._put(mailbox, stream, [] if chunk is None else [chunk]):
                    return
            await self._put(mailbox, stream, [end])

    async def _put(self, mailbox: Any, stream: int, letters: list[Any]) -> bool:
        try:
            async with asyncio.timeout(self.mailbox_timeout_s):
                return bool(await mailbox.put.remote(stream, letters))
        except TimeoutError as error:
            raise UnavailableError(
                f"the client's mailbox has taken nothing for {self.mailbox_timeout_s:g} s"
            ) from error

    async def _whole(self, endpoint: str, body: Body) -> Body:
        call = await self._begin(endpoint, body)
        with call.stream:
            return await call.whole()

    async def _chunks(self, endpoint: str, body: Body) -> AsyncGenerator[Body | None, None]:
        call = await self._begin(endpoint, body)
        with call.stream:
            async for chunk in call.chunks(self._service.settings.keep_alive_s):
                yield chunk

    async def _begin(self, endpoint: str, body: Body) -> Call:
        return await begin(
            self._service, parse_body(json.dumps(body).encode(), _BODY_TYPES[endpoint])
        )
