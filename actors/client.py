"""The ways of `fmoe_ray.Client` over Ray: a Serve handle inside the cluster, or `ray://`."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import ray

from fmoe_ray.actors.connection import Connection, our_errors
from fmoe_ray.actors.in_time import in_time
from fmoe_ray.actors.mailbox import Letter
from fmoe_ray.client.answers import Body
from fmoe_ray.client.transport import Endpoint

_POLL_S = 1.0
_METHODS = {"chat/completions": "chat", "completions": "complete"}


class RayTransport:
    """Calls a replica through its handle; over `ray://` streams come through a mailbox."""

    def __init__(self, target: Any, application: str | None, timeout_s: float) -> None:
        """Raises ConfigError or UnavailableError where the target leads to no application."""
        self._connection = Connection(target, application)
        self._timeout_s = timeout_s

    def models(self) -> list[str]:
        with our_errors():
            names: list[str] = self._result("models")
            return names

    def answer(self, endpoint: Endpoint, body: Body) -> Body:
        with our_errors():
            answer: Body = self._result(_METHODS[endpoint], body)
            return answer

    def stream(self, endpoint: Endpoint, body: Body) -> Generator[Body, None, None]:
        chunks = self._receive if self._connection.needs_mailbox else self._iterate
        with our_errors():
            yield from chunks(endpoint, body)

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, *args: Any) -> Any:
        return self._connection.handle.options(method_name=method).remote(*args)

    def _result(self, method: str, *args: Any) -> Any:
        response = self._call(method, *args)
        try:
            return response.result(timeout_s=self._timeout_s)
        except (TimeoutError, KeyboardInterrupt):
            response.cancel()  # nobody reads the answer: its KV slot is for others
            raise

    def _iterate(self, endpoint: Endpoint, body: Body) -> Iterator[Body]:
        method = f"stream_{_METHODS[endpoint]}"
        chunks = self._connection.handle.options(method_name=method, stream=True).remote(body)
        try:
            yield from (chunk for chunk in in_time(chunks, self._timeout_s) if chunk is not None)
        finally:
            chunks.cancel()

    def _receive(self, endpoint: Endpoint, body: Body) -> Iterator[Body]:
        mailbox, stream = self._connection.open_stream()
        pushing = self._call("push", endpoint, body, mailbox, stream)
        silence = Silence(self._timeout_s)
        try:
            while True:
                has_arrived, letters = ray.get(
                    mailbox.take.remote(stream, _POLL_S), timeout=self._timeout_s + _POLL_S
                )
                for letter in letters:
                    if is_end(letter):
                        return
                    yield letter
                if not has_arrived:
                    silence.goes_on()
                    _raise_if_failed(pushing)
                else:
                    silence.ends()
        finally:
            pushing.cancel()
            mailbox.close.remote(stream)


class AsyncRayTransport:
    """`RayTransport` for asyncio."""

    def __init__(self, target: Any, application: str | None, timeout_s: float) -> None:
        self._connection = Connection(target, application)
        self._timeout_s = timeout_s

    async def models(self) -> list[str]:
        with our_errors():
            names: list[str] = await self._result("models")
            return names

    async def answer(self, endpoint: Endpoint, body: Body) -> Body:
        with our_errors():
            answer: Body = await self._result(_METHODS[endpoint], body)
            return answer

    async def stream(self, endpoint: Endpoint, body: Body) -> AsyncGenerator[Body, None]:
        chunks = self._receive if self._connection.needs_mailbox else self._iterate
        with our_errors():
            async for chunk in chunks(endpoint, body):
                yield chunk

    async def close(self) -> None:
        self._connection.close()

    async def _result(self, method: str, *args: Any) -> Any:
        response = self._connection.handle.options(method_name=method).remote(*args)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await response
        except (TimeoutError, asyncio.CancelledError):
            response.cancel()  # nobody reads the answer: its KV slot is for others
            raise

    async def _iterate(self, endpoint: Endpoint, body: Body) -> AsyncGenerator[Body, None]:
        method = f"stream_{_METHODS[endpoint]}"
        chunks = self._connection.handle.options(method_name=method, stream=True).remote(body)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
                if chunk is not None:
                    yield chunk
        finally:
            chunks.cancel()

    async def _receive(self, endpoint: Endpoint, body: Body) -> AsyncGenerator[Body, None]:
        mailbox, stream = self._connection.open_stream()
        handle = self._connection.handle.options(method_name="push")
        response = handle.remote(endpoint, body, mailbox, stream)
        pushing = asyncio.ensure_future(_awaited(response))
        silence = Silence(self._timeout_s)
        try:
            while True:
                async with asyncio.timeout(self._timeout_s + _POLL_S):
                    has_arrived, letters = await mailbox.take.remote(stream, _POLL_S)
                for letter in letters:
                    if is_end(letter):
                        return
                    yield letter
                if not has_arrived:
                    silence.goes_on()
                    if pushing.done():
                        pushing.result()
                else:
                    silence.ends()
        finally:
            response.cancel()
            mailbox.close.remote(stream)
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)


class Silence:
    """How long nothing has come."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seconds = 0.0

    def goes_on(self) -> None:
        self._seconds += _POLL_S
        if self._seconds >= self._limit_s:
            raise TimeoutError(f"nothing came for {self._limit_s:g} s")

    def ends(self) -> None:
        self._seconds = 0.0


def is_end(letter: Letter) -> bool:
    """Raises what ended the stream early."""
    if isinstance(letter, Exception):
        raise letter
    return letter is None


async def _awaited(response: Any) -> Any:
    return await response


def _raise_if_failed(response: Any) -> None:
    try:
        response.result(timeout_s=0)
    except TimeoutError:
        pass  # it goes on
