"""Client and AsyncClient. They know what to ask, and not how it gets there."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from math import inf
from typing import Any, Literal, Self, overload

from fmoe_ray.client.answers import Answer, Body, Piece, read_answer, read_chunk
from fmoe_ray.client.transport import AsyncTransport, Endpoint, Transport
from fmoe_ray.errors import ConfigError, InvalidRequestError

_CHAT: Endpoint = "chat/completions"
_COMPLETIONS: Endpoint = "completions"


class Client:
    """Talks to one server.

        with Client("http://127.0.0.1:8000") as client:
            print(client.chat([{"role": "user", "content": "Hello"}], max_tokens=20).text)

    `target` is an address, `http://`, `https://` (with or without `/v1`) or `ray://`, or the handle
    of a Serve deployment inside the cluster. Over `ray://` Ray and Python must be of the cluster's
    minor versions, and `application` names the Serve application where there are several.

    `model` defaults to the one the server has. Further keyword arguments (max_tokens, temperature,
    top_p, top_k, seed, stop) go into the request's body as they are; those that ask for several
    answers are refused. Every method raises
    InvalidRequestError, AuthenticationError, ModelNotFoundError, OverloadedError, DeadlineError,
    UnavailableError or EngineError, as the server says, and UnavailableError if it cannot be
    reached or is silent for `timeout_s`.
    """

    def __init__(
        self,
        target: Any,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        application: str | None = None,
    ) -> None:
        """Raises ConfigError for a target of another kind or a setting that it does not take."""
        self._transport = _transport(target, api_key, timeout_s, application)
        self._model = model

    @overload
    def chat(
        self, messages: Sequence[dict[str, str]], *, stream: Literal[False] = False, **options: Any
    ) -> Answer: ...

    @overload
    def chat(
        self, messages: Sequence[dict[str, str]], *, stream: Literal[True], **options: Any
    ) -> Iterator[Piece]: ...

    def chat(
        self, messages: Sequence[dict[str, str]], *, stream: bool = False, **options: Any
    ) -> Answer | Iterator[Piece]:
        """With `stream` an iterator: closing it cancels the request, a broken stream raises."""
        body = _for_one_answer({"messages": list(messages), **options})
        return self._stream(_CHAT, body) if stream else self._answer(_CHAT, body)

    @overload
    def complete(
        self, prompt: str | list[int], *, stream: Literal[False] = False, **options: Any
    ) -> Answer: ...

    @overload
    def complete(
        self, prompt: str | list[int], *, stream: Literal[True], **options: Any
    ) -> Iterator[Piece]: ...

    def complete(
        self, prompt: str | list[int], *, stream: bool = False, **options: Any
    ) -> Answer | Iterator[Piece]:
        body = _for_one_answer({"prompt": prompt, **options})
        return self._stream(_COMPLETIONS, body) if stream else self._answer(_COMPLETIONS, body)

    def models(self) -> list[str]:
        return self._transport.models()

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, endpoint: Endpoint, body: Body) -> Answer:
        return read_answer(self._transport.answer(endpoint, {"model": self._model_name(), **body}))

    def _stream(self, endpoint: Endpoint, body: Body) -> Iterator[Piece]:
        request = _stream_body(self._model_name(), body)
        with closing(self._transport.stream(endpoint, request)) as chunks:
            for chunk in chunks:
                yield from read_chunk(chunk)

    def _model_name(self) -> str:
        if self._model is None:
            self._model = self.models()[0]
        return self._model


class AsyncClient:
    """`Client` for asyncio. With `stream` the call is awaited too: `async for p in await ...`."""

    def __init__(
        self,
        target: Any,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        application: str | None = None,
    ) -> None:
        self._transport = _async_transport(target, api_key, timeout_s, application)
        self._model = model

    @overload
    async def chat(
        self, messages: Sequence[dict[str, str]], *, stream: Literal[False] = False, **options: Any
    ) -> Answer: ...

    @overload
    async def chat(
        self, messages: Sequence[dict[str, str]], *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Piece]: ...

    async def chat(
        self, messages: Sequence[dict[str, str]], *, stream: bool = False, **options: Any
    ) -> Answer | AsyncIterator[Piece]:
        body = _for_one_answer({"messages": list(messages), **options})
        return self._stream(_CHAT, body) if stream else await self._answer(_CHAT, body)

    @overload
    async def complete(
        self, prompt: str | list[int], *, stream: Literal[False] = False, **options: Any
    ) -> Answer: ...

    @overload
    async def complete(
        self, prompt: str | list[int], *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Piece]: ...

    async def complete(
        self, prompt: str | list[int], *, stream: bool = False, **options: Any
    ) -> Answer | AsyncIterator[Piece]:
        body = _for_one_answer({"prompt": prompt, **options})
        return (
            self._stream(_COMPLETIONS, body) if stream else await self._answer(_COMPLETIONS, body)
        )

    async def models(self) -> list[str]:
        return await self._transport.models()

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(self, endpoint: Endpoint, body: Body) -> Answer:
        model = await self._model_name()
        return read_answer(await self._transport.answer(endpoint, {"model": model, **body}))

    async def _stream(self, endpoint: Endpoint, body: Body) -> AsyncIterator[Piece]:
        request = _stream_body(await self._model_name(), body)
        async with aclosing(self._transport.stream(endpoint, request)) as chunks:
            async for chunk in chunks:
                for piece in read_chunk(chunk):
                    yield piece

    async def _model_name(self) -> str:
        if self._model is None:
            self._model = (await self.models())[0]
        return self._model


def _for_one_answer(body: Body) -> Body:
    """An `Answer` and a stream of pieces have room for one choice: no other is dropped silently."""
    n, prompt = body.get("n"), body.get("prompt")
    if isinstance(n, int) and n > 1:
        raise InvalidRequestError(
            f"n: {n} answers were asked for and this client reads one: send {n} requests, or use "
            "the openai package",
            "n",
            "unsupported_value",
        )
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise InvalidRequestError(
            f"prompt: {len(prompt)} prompts were given and this client reads one answer: send "
            f"{len(prompt)} requests, or use the openai package",
            "prompt",
            "unsupported_value",
        )
    return body


def _stream_body(model: str, body: Body) -> Body:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **options, **body}


def _transport(
    target: Any, api_key: str | None, timeout_s: float, application: str | None
) -> Transport:
    if _is_http(target, api_key, timeout_s, application):
        from fmoe_ray.client.http import HttpTransport

        return HttpTransport(target, api_key, timeout_s)
    from fmoe_ray.actors.client import RayTransport

    return RayTransport(target, application, timeout_s)


def _async_transport(
    target: Any, api_key: str | None, timeout_s: float, application: str | None
) -> AsyncTransport:
    if _is_http(target, api_key, timeout_s, application):
        from fmoe_ray.client.http import AsyncHttpTransport

        return AsyncHttpTransport(target, api_key, timeout_s)
    from fmoe_ray.actors.client import AsyncRayTransport

    return AsyncRayTransport(target, application, timeout_s)


def _is_http(target: Any, api_key: str | None, timeout_s: float, application: str | None) -> bool:
    """Raises ConfigError for what fits no transport, or not the one that the target means."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < inf:
        raise ConfigError(f"timeout_s {timeout_s!r}: give seconds above 0")
    is_http = isinstance(target, str) and target.startswith(("http://", "https://"))
    if isinstance(target, str) and not is_http and not target.startswith("ray://"):
        raise ConfigError(
            f"{target!r} is no address of a server; write http://HOST:PORT or ray://HOST:PORT"
        )
    if is_http and application is not None:
        raise ConfigError(
            f"application {application!r} has no effect over HTTP: its address names it"
        )
    if not is_http and api_key is not None:
        raise ConfigError("api_key has no effect over Ray: whoever reaches the cluster is let in")
    return is_http
