"""The seam between the clients and the ways to a server."""

from collections.abc import AsyncGenerator, Generator
from typing import Literal, Protocol

from fmoe_ray.client.answers import Body

Endpoint = Literal["chat/completions", "completions"]


class Transport(Protocol):
    """Raises the server's errors as exceptions of this package, UnavailableError where there is no
    server, none that answers in time, or a stream that breaks off.
    """

    def models(self) -> list[str]: ...

    def answer(self, endpoint: Endpoint, body: Body) -> Body: ...

    def stream(self, endpoint: Endpoint, body: Body) -> Generator[Body, None, None]:
        """The events of a stream; closing the iterator cancels the request."""
        ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """`Transport` for asyncio."""

    async def models(self) -> list[str]: ...

    async def answer(self, endpoint: Endpoint, body: Body) -> Body: ...

    def stream(self, endpoint: Endpoint, body: Body) -> AsyncGenerator[Body, None]: ...

    async def close(self) -> None: ...
