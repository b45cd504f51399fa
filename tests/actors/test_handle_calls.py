"""Calls on a replica without Ray: a mailbox that hangs holds no KV slot."""

import asyncio
from typing import Any

import pytest

from fmoe_ray.actors.handle_calls import HandleCalls
from fmoe_ray.api.service import Service
from fmoe_ray.api.stub_server import stub_service
from fmoe_ray.errors import InvalidRequestError, UnavailableError

LIMIT_S = 10.0
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Calls(HandleCalls):
    mailbox_timeout_s = 0.1

    def __init__(self, service: Service) -> None:
        self._service = service


class FullMailbox:
    """Takes so many puts, and then never answers. In the shape of an actor."""

    def __init__(self, num_taken: int) -> None:
        self._num_left = num_taken
        self.letters: list[Any] = []
        self.put = self

    async def remote(self, stream: int, letters: list[Any]) -> bool:
        if self._num_left == 0:
            await asyncio.Event().wait()
        self._num_left -= 1
        self.letters += letters
        return True


@pytest.mark.parametrize("num_taken", [0, 2])
def test_a_mailbox_that_takes_nothing_ends_the_request(num_taken: int) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), stub_service() as service:
            body = {**HELLO, "stream": True, "ignore_eos": True, "max_tokens": 200}
            pushing = Calls(service).push("chat/completions", body, FullMailbox(num_taken), 0)
            with pytest.raises(UnavailableError, match=r"taken nothing for 0\.1 s"):
                await pushing
            while service.engine.health().num_running:
                await asyncio.sleep(0)

    asyncio.run(run())


def test_the_error_of_a_stream_is_its_last_letter() -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), stub_service() as service:
            mailbox = FullMailbox(99)
            await Calls(service).push("chat/completions", {**HELLO, "max_tokens": -1}, mailbox, 0)
            assert [type(letter) for letter in mailbox.letters] == [InvalidRequestError]
            await Calls(service).push("chat/completions", {**HELLO, "stream": True}, mailbox, 0)
            assert mailbox.letters[-1] is None and len(mailbox.letters) > 2

    asyncio.run(run())
