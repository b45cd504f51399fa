"""The way out of the engine for requests submitted together; at most one event each waits."""

import asyncio
from collections.abc import Callable
from typing import Self

from fmoe_ray.engine.request import Event


class EventStream:
    """Async iterator of events. Closing it, or leaving its `with` block, cancels what still runs.

    What is generated while the reader is busy joins the waiting event: a slow reader costs no more
    memory than its answer, and a fast one sees every token alone. One reader, on the loop of the
    engine.
    """

    def __init__(self, num_requests: int, cancel: Callable[[], None]) -> None:
        self._num_left = num_requests
        self._cancel = cancel
        self._waiting: dict[int, Event] = {}
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Called by the engine. After a request's event with a finish reason it has no more."""
        waiting = self._waiting.setdefault(event.index, event)
        if waiting is not event:
            waiting.absorb(event)
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._num_left == 0:
            raise StopAsyncIteration
        await self._arrived.wait()
        index = next(iter(self._waiting))
        event = self._waiting.pop(index)
        if not self._waiting:
            self._arrived.clear()
        if event.finish_reason is not None:
            self._num_left -= 1
        return event

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    async def next_within(self, timeout_s: float) -> Event | None:
        """The next event, or None if there is none for `timeout_s`; the requests go on."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.__anext__()
        except TimeoutError:
            return None

    def close(self) -> None:
        """Frees the slots within a step. May be called again, and after the end."""
        if self._num_left > 0:
            self._num_left = 0
            self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
