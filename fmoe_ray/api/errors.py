"""Every failure as an OpenAI error body: {"error": {"message", "type", "param", "code"}}."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fmoe_ray.errors import (
    FmoeError,
    OverloadedError,
    RequestError,
    StepTimeoutError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_REPLICA_LEAVES = (UnavailableError, StepTimeoutError)  # another one can answer


def error_body(error: FmoeError) -> dict[str, Any]:
    if isinstance(error, RequestError):
        return _body(str(error), error.kind, error.param, error.code)
    if isinstance(error, _REPLICA_LEAVES):
        return _body(str(error), "service_unavailable_error", code="unavailable")
    return _body(str(error), "server_error", code="engine_error")


def error_response(error: FmoeError) -> JSONResponse:
    if isinstance(error, RequestError):
        status = error.status
    else:
        status = 503 if isinstance(error, _REPLICA_LEAVES) else 500
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = f"{error.retry_after_s:.0f}"
    elif status == 503:
        headers["retry-after"] = "1"
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(FmoeError)
    async def _on_fmoe_error(_: Request, error: FmoeError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        phrase = HTTPStatus(error.status_code).phrase
        message = f"{request.method} {request.url.path}: {error.detail or phrase}"
        return JSONResponse(
            _body(message, "invalid_request_error"), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def _on_defect(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        message = "internal error; the server's log has the details"
        return JSONResponse(_body(message, "server_error", code="internal_error"), 500)


def _body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
