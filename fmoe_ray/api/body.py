"""Reads and checks a request's body; says what is wrong with it in one sentence."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fmoe_ray.errors import InvalidRequestError

MAX_BODY_BYTES = 16 * 2**20

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, body_type: type[Body]) -> Body:
    """Reads JSON whatever the content type says, as OpenAI does.

    Raises InvalidRequestError naming the field.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return parse_body(bytes(raw), body_type)


def parse_body(raw: bytes, body_type: type[Body]) -> Body:
    """Raises InvalidRequestError naming the field."""
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid_request(error.errors(include_url=False)[0]) from error


def describe_body(body_type: type[BaseModel]) -> dict[str, Any]:
    """The body's schema, for the OpenAPI page."""
    schema = body_type.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def _invalid_request(error: ErrorDetails) -> InvalidRequestError:
    path = [str(part) for part in error["loc"]]
    param = ".".join(path) or None
    match error["type"]:
        case "json_invalid":
            return InvalidRequestError(
                f"the body is not JSON: {error['msg']}", None, "invalid_json"
            )
        case "unsupported_field":
            param = ".".join([*path, error["ctx"]["field"]])
            return InvalidRequestError(f"{param} {error['msg']}", param, "unsupported_value")
        case "extra_forbidden":
            return InvalidRequestError(f"unknown field {param}; remove it", param, "unknown_field")
        case "missing":
            return InvalidRequestError(f"{param} is required", param, "missing_field")
    message = error["msg"].removeprefix("Value error, ")
    shown = repr(error.get("input"))
    shown = shown if len(shown) <= 80 else shown[:80] + "..."
    return InvalidRequestError(f"{param or 'body'}: {message}, got {shown}", param, "invalid_value")
