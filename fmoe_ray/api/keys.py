"""Bearer tokens for the endpoints under /v1."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from fmoe_ray.api.errors import error_response
from fmoe_ray.errors import AuthenticationError


class KeyCheck:
    """Asks for a bearer token on /v1, before anything of the request is read."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not self._accepts(given):
                error = AuthenticationError(
                    "no key or a wrong one; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _accepts(self, given: bytes) -> bool:
        key = given.removeprefix(b"Bearer ")
        # Every key is compared, so that the time says nothing about which one was close.
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return given.startswith(b"Bearer ") and any(matches)
