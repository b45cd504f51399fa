"""Client and AsyncClient: a server's answers over HTTP, its errors as this package's exceptions."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, overload

import httpx

from fmoe_ray.errors import UnavailableError
from fmoe_ray.wire import Answer, Piece, StreamReader, read_answer, read_error, read_model_names

_CHAT, _COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_CONNECT_TIMEOUT_S = 10.0


class Client:
    """Talks to one server.

        with Client("http://127.0.0.1:8000") as client:
            print(client.chat([{"role": "user", "content": "Hello"}], max_tokens=20).text)

    `model` defaults to the one the server has. Further keyword arguments (max_tokens, temperature,
    top_p, top_k, seed, stop) go into the request's body as they are. Every method raises
    InvalidRequestError, AuthenticationError, ModelNotFoundError, OverloadedError, DeadlineError,
    UnavailableError or EngineError, as the server says, and UnavailableError if it cannot be
    reached or is silent for `timeout_s`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._http = httpx.Client(**_options(base_url, api_key, timeout_s))
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
        body = {"messages": list(messages), **options}
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
        body = {"prompt": prompt, **options}
        return self._stream(_COMPLETIONS, body) if stream else self._answer(_COMPLETIONS, body)

    def models(self) -> list[str]:
        with _our_errors():
            response = self._http.get(_MODELS)
        return read_model_names(response)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        with _our_errors():
            response = self._http.post(path, json={"model": self._model_name(), **body})
        return read_answer(response)

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        request = _stream_body(self._model_name(), body)
        with _our_errors(), self._http.stream("POST", path, json=request) as response:
            if response.is_error:
                response.read()
                raise read_error(response)
            reader = StreamReader()
            for line in response.iter_lines():
                yield from reader.read(line)
            reader.finish()

    def _model_name(self) -> str:
        if self._model is None:
            self._model = self.models()[0]
        return self._model


class AsyncClient:
    """`Client` for asyncio. With `stream` the call is awaited too: `async for p in await ...`."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._http = httpx.AsyncClient(**_options(base_url, api_key, timeout_s))
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
        body = {"messages": list(messages), **options}
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
        body = {"prompt": prompt, **options}
        return (
            self._stream(_COMPLETIONS, body) if stream else await self._answer(_COMPLETIONS, body)
        )

    async def models(self) -> list[str]:
        with _our_errors():
            response = await self._http.get(_MODELS)
        return read_model_names(response)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        model = await self._model_name()
        with _our_errors():
            response = await self._http.post(path, json={"model": model, **body})
        return read_answer(response)

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Piece]:
        request = _stream_body(await self._model_name(), body)
        with _our_errors():
            async with self._http.stream("POST", path, json=request) as response:
                if response.is_error:
                    await response.aread()
                    raise read_error(response)
                reader = StreamReader()
                async for line in response.aiter_lines():
                    for piece in reader.read(line):
                        yield piece
                reader.finish()

    async def _model_name(self) -> str:
        if self._model is None:
            self._model = (await self.models())[0]
        return self._model


def _options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    # The time-out is between two reads, not for the whole answer: during long waits the server
    # sends comments.
    return {
        "base_url": base_url,
        "headers": {} if api_key is None else {"authorization": f"Bearer {api_key}"},
        "timeout": httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
    }


def _stream_body(model: str, body: dict[str, Any]) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **options, **body}


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise UnavailableError(f"no answer in time: {error!r}") from error
    except httpx.TransportError as error:
        raise UnavailableError(f"the connection failed: {error}") from error
