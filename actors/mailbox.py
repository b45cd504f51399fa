"""Streams over `ray://`, where Ray refuses streaming calls: an actor of the client takes letters.

One mailbox a client; it dies with the client's connection, and then the replica's push fails.
"""

import asyncio
from typing import Any

import ray

Letter = dict[str, Any] | Exception | None
"""A chunk, what ended the stream early, or its end."""


class Mailbox:
    """Letters of many streams. What arrives between two `take`s travels together."""

    def __init__(self) -> None:
        self._letters: dict[int, list[Letter]] = {}
        self._arrivals: dict[int, asyncio.Event] = {}
        self._closed: set[int] = set()

    async def put(self, stream: int, letters: list[Letter]) -> bool:
        """False: the reader is gone. Without letters it tells the reader that the sender lives."""
        if stream in self._closed:
            return False
        self._letters.setdefault(stream, []).extend(letters)
        self._arrival(stream).set()
        return True

    async def take(self, stream: int, timeout_s: float) -> tuple[bool, list[Letter]]:
        """Whether anything was put within `timeout_s`, and the letters so far."""
        arrival = self._arrival(stream)
        try:
            async with asyncio.timeout(timeout_s):
                await arrival.wait()
        except TimeoutError:
            return False, []
        arrival.clear()
        return True, self._letters.pop(stream, [])

    async def close(self, stream: int) -> None:
        self._closed.add(stream)
        self._letters.pop(stream, None)
        self._arrivals.pop(stream, None)

    def _arrival(self, stream: int) -> asyncio.Event:
        return self._arrivals.setdefault(stream, asyncio.Event())


RemoteMailbox: Any = ray.remote(num_cpus=0, max_concurrency=1000)(Mailbox)
