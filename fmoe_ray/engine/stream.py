"""The way out of the engine for requests submitted together; at most one event each waits."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from fmoe_ray.engine.request import Event


class EventStream:
    """Async iterator of events. Closing it, or leaving its `with` block, cancels what still runs.

    What is generated while the reader is busy joins the waiting event: a slow reader costs no more
    memory than its answer. So does what comes within `interval_s` of a request's event before:
    it is handed over when that time is up, or with the request's end. A request's first event is
    never held back, nor one that comes later than that. One reader, on the loop of the engine.
    """

    def __init__(
        self, num_requests: int, cancel: Callable[[], None], *, interval_s: float = 0.0
    ) -> None:
        """With an `interval_s` of 0 a fast reader sees every token alone; infinite, the first and
        the end. The reader may change it.
        """
        self._num_left = num_requests
        self._cancel = cancel
        self.interval_s = interval_s
        self._waiting: dict[int, Event] = {}
        self._handed_over_s: dict[int, float] = {}
        self._has_news = asyncio.Event()

    def put(self, event: Event) -> None:
        """Called by the engine. After a request's event with a finish reason it has no more."""
        waiting = self._waiting.setdefault(event.index, event)
        if waiting is not event:
            waiting.absorb(event)
        if waiting is event or event.finish_reason is not None:
            self._has_news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        now = asyncio.get_running_loop().time
        while self._num_left > 0:
            index = min(self._waiting, key=self._due_s, default=None)
            due_s = None if index is None else self._due_s(index)
            if index is not None and due_s is not None and due_s <= now():
                self._handed_over_s[index] = now()
                return self._take(index)
            self._has_news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._has_news.wait()
        raise StopAsyncIteration

    def _due_s(self, index: int) -> float:
        """When the waiting event of a request may be handed over, on the loop's clock."""
        is_last = self._waiting[index].finish_reason is not None
        if is_last or index not in self._handed_over_s:
            return -math.inf
        return self._handed_over_s[index] + self.interval_s

    def _take(self, index: int) -> Event:
        event = self._waiting.pop(index)
        if event.finish_reason is not None:
            self._num_left -= 1
        return event

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    async def next_within(self, timeout_s: float) -> Event | None:
        """The next event, or None if there is none for `timeout_s` or none comes any more; the
        requests go on.
        """
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(timeout_s):
                return await anext(self)
        return None

    def close(self) -> None:
        """Frees the slots within a step and ends the iteration. May be called again, and after the
        end.
        """
        if self._num_left > 0:
            self._num_left = 0
            self._has_news.set()
            self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
