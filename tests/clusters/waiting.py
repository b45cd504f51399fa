"""What scenarios wait for."""

import socket
import time
from collections.abc import Callable
from typing import Any

import httpx


def within(seconds: float, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.2)
    return value


def is_ok(url: str) -> dict[str, Any] | None:
    try:
        response = httpx.get(url, timeout=10)
    except httpx.TransportError:
        return None
    return dict(response.json()) if response.status_code == 200 else None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
