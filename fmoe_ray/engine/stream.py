"""One request's way out of the engine: at most one event waits for the reader."""

import asyncio
from collections.abc import Callable
from typing import Self

from fmoe_ray.engine.request import Event


class EventStream:
    """Async iterator of a request's events. Closing it, or leaving `async with`, cancels it.

    What is generated while the reader is busy joins the waiting event: a slow reader costs no more
    memory than its answer, and a fast one sees every token alone. One reader, on the loop of the
    engine.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._waiting: Event | None = None
        self._arrived = asyncio.Event()
        self._is_over = False

    def put(self, event: Event) -> None:
        """Called by the engine. After an event with a finish reason there are no more."""
        if self._waiting is None:
            self._waiting = event
        else:
            self._waiting.absorb(event)
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        event, self._waiting = self._waiting, None
        assert event is not None, "woken without an event"
        self._is_over = event.finish_reason is not None
        return event

    async def next_within(self, timeout_s: float) -> Event | None:
        """The next event, or None if there is none for `timeout_s`; the request goes on."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.__anext__()
        except TimeoutError:
            return None

    def close(self) -> None:
        """Frees the request's slot within a step. May be called again, and after the end."""
        if not self._is_over:
            self._is_over = True
            self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
