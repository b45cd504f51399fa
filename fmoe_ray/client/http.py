"""Requests over HTTP, streams as server-sent events."""

import json
import re
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from fmoe_ray.client.answers import Body, error_body, error_from
from fmoe_ray.client.transport import Endpoint
from fmoe_ray.errors import FmoeError, UnavailableError

_CONNECT_TIMEOUT_S = 10.0


class HttpTransport:
    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._http = httpx.Client(**_options(base_url, api_key, timeout_s))
        self._address = base_url

    def models(self) -> list[str]:
        with _our_errors(self._address):
            return _model_names(self._http.get("/v1/models"))

    def answer(self, endpoint: Endpoint, body: Body) -> Body:
        with _our_errors(self._address):
            return _read(self._http.post(f"/v1/{endpoint}", json=body))

    def stream(self, endpoint: Endpoint, body: Body) -> Generator[Body, None, None]:
        sending = self._http.stream("POST", f"/v1/{endpoint}", json=body)
        with _our_errors(self._address), sending as response:
            if response.is_error:
                response.read()
                raise _error(response)
            events = _Events()
            for line in response.iter_lines():
                yield from events.read(line)
            events.finish()

    def close(self) -> None:
        self._http.close()


class AsyncHttpTransport:
    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._http = httpx.AsyncClient(**_options(base_url, api_key, timeout_s))
        self._address = base_url

    async def models(self) -> list[str]:
        with _our_errors(self._address):
            return _model_names(await self._http.get("/v1/models"))

    async def answer(self, endpoint: Endpoint, body: Body) -> Body:
        with _our_errors(self._address):
            return _read(await self._http.post(f"/v1/{endpoint}", json=body))

    async def stream(self, endpoint: Endpoint, body: Body) -> AsyncGenerator[Body, None]:
        with _our_errors(self._address):
            async with self._http.stream("POST", f"/v1/{endpoint}", json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise _error(response)
                events = _Events()
                async for line in response.aiter_lines():
                    for event in events.read(line):
                        yield event
                events.finish()

    async def close(self) -> None:
        await self._http.aclose()


class _Events:
    """Lines to events. A stream without [DONE] has failed, however it ended."""

    def __init__(self) -> None:
        self._is_done = False

    def read(self, line: str) -> Iterator[Body]:
        if not line.startswith("data: "):
            return  # an empty line, or a comment that keeps the connection alive
        payload = line.removeprefix("data: ")
        if payload == "[DONE]":
            self._is_done = True
        else:
            yield json.loads(payload)

    def finish(self) -> None:
        if not self._is_done:
            raise UnavailableError("the stream broke off before its end; send the request again")


def _options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    # The time-out is between two reads, not for the whole answer: during long waits the server
    # sends comments.
    return {
        # OpenAI's clients are given the address with the version: that works here too.
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": {} if api_key is None else {"authorization": f"Bearer {api_key}"},
        "timeout": httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
    }


def _read(response: httpx.Response) -> Body:
    if response.is_error:
        raise _error(response)
    body: Body = response.json()
    return body


def _model_names(response: httpx.Response) -> list[str]:
    return [model["id"] for model in _read(response)["data"]]


def _error(response: httpx.Response) -> FmoeError:
    try:
        parsed = response.json()
    except ValueError:
        parsed = None  # a proxy's own words
    retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
    return error_from(error_body(parsed, response.text), response.status_code, retry_after_s)


def _retry_after_s(value: str) -> float:
    """Seconds, or the HTTP date that a proxy may send instead; 1 for neither."""
    if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 1.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


@contextmanager
def _our_errors(address: str) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise UnavailableError(f"{address}: no answer in time: {error!r}") from error
    except httpx.TransportError as error:
        raise UnavailableError(f"{address}: the connection failed: {error}") from error
