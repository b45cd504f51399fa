"""How a client reads what the server sends: answers, streams, errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from fmoe_ray.errors import (
    AuthenticationError,
    DeadlineError,
    EngineError,
    FmoeError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`usage` is the server's block, with the expert statistics under `fmoe`."""

    text: str
    finish_reason: str
    usage: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a streamed answer. `finish_reason` and `usage` come with the last ones."""

    text: str
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class StreamReader:
    """Server-sent events to pieces. A stream without [DONE] has failed, however it ended."""

    def __init__(self) -> None:
        self._is_done = False

    def read(self, line: str) -> Iterator[Piece]:
        if not line.startswith("data: "):
            return  # an empty line, or a comment that keeps the connection alive
        payload = line.removeprefix("data: ")
        if payload == "[DONE]":
            self._is_done = True
            return
        body = json.loads(payload)
        if "error" in body:
            raise _error_from(_error_body(body, payload), 500, 1.0)
        for choice in body["choices"]:
            yield Piece(text=_text_of(choice), finish_reason=choice["finish_reason"])
        if body.get("usage") is not None:
            yield Piece(text="", usage=body["usage"])

    def finish(self) -> None:
        if not self._is_done:
            raise UnavailableError("the stream broke off before its end; send the request again")


def read_answer(response: httpx.Response) -> Answer:
    if response.is_error:
        raise read_error(response)
    body = response.json()
    choice = body["choices"][0]
    return Answer(text=_text_of(choice), finish_reason=choice["finish_reason"], usage=body["usage"])


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text", part.get("content", ""))
    assert isinstance(text, str), choice
    return text


def read_model_names(response: httpx.Response) -> list[str]:
    if response.is_error:
        raise read_error(response)
    return [model["id"] for model in response.json()["data"]]


def read_error(response: httpx.Response) -> FmoeError:
    try:
        parsed = response.json()
    except ValueError:
        parsed = None  # a proxy's own words
    retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
    return _error_from(_error_body(parsed, response.text), response.status_code, retry_after_s)


def _error_body(parsed: object, text: str) -> dict[str, Any]:
    """OpenAI's error object; whoever sends another one has at least its words kept."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    return {"message": error if isinstance(error, str) else text}


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


def _error_from(body: dict[str, Any], status: int, retry_after_s: float) -> FmoeError:
    """In a stream the status is gone, and the error's type decides."""
    message, param, code = body["message"], body.get("param"), body.get("code")
    kind = body.get("type")
    if status == 401:
        return AuthenticationError(message, param, code)
    if status == 404:
        return ModelNotFoundError(message, param, code)
    if status == 408 or kind == DeadlineError.kind:
        return DeadlineError(message, param, code)
    if status == 429:
        return OverloadedError(message, param, code, retry_after_s)
    if status == 503 or kind == "service_unavailable_error":
        return UnavailableError(message)
    if 400 <= status < 500:
        return InvalidRequestError(message, param, code)
    return EngineError(message)
