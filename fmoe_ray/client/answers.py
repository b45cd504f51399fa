"""From the bodies that a server sends to what a caller reads, and to this package's exceptions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`usage` is the server's block, with the expert statistics under `fmoe`."""

    text: str
    finish_reason: str
    usage: Body


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a streamed answer. `finish_reason` and `usage` come with the last ones."""

    text: str
    finish_reason: str | None = None
    usage: Body | None = None


def read_answer(body: Body) -> Answer:
    choice = body["choices"][0]
    return Answer(text=_text_of(choice), finish_reason=choice["finish_reason"], usage=body["usage"])


def read_chunk(body: Body) -> Iterator[Piece]:
    """The pieces of one event of a stream. Raises the error that it may be."""
    if "error" in body:
        raise error_from(error_body(body, str(body)), 500, 1.0)
    for choice in body["choices"]:
        yield Piece(text=_text_of(choice), finish_reason=choice["finish_reason"])
    if body.get("usage") is not None:
        yield Piece(text="", usage=body["usage"])


def error_body(parsed: object, text: str) -> Body:
    """OpenAI's error object; whoever sends another one has at least its words kept."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    return {"message": error if isinstance(error, str) else text}


def error_from(body: Body, status: int, retry_after_s: float) -> FmoeError:
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


def _text_of(choice: Body) -> str:
    part = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text", part.get("content", ""))
    assert isinstance(text, str), choice
    return text
