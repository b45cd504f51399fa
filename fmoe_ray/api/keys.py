"""Bearer tokens for the endpoints under /v1."""

import hmac

from fastapi import Request

from fmoe_ray.errors import AuthenticationError


def check_key(request: Request) -> None:
    """A dependency of the routes it protects: routing decides what they are, not a path's text,
    which carries any prefix under which the application is served.

    Runs before anything of the body is read. Raises AuthenticationError.
    """
    keys = request.app.state.service.settings.api_keys
    if keys and not _accepts(request.headers.get("authorization", ""), keys):
        raise AuthenticationError(
            "no key or a wrong one; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
        )


def _accepts(given: str, keys: tuple[str, ...]) -> bool:
    key = given.removeprefix("Bearer ").encode()
    # Every key is compared, so that the time says nothing about which one was close.
    matches = [hmac.compare_digest(key, known.encode()) for known in keys]
    return given.startswith("Bearer ") and any(matches)
