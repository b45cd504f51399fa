"""Keeps processes that replace the same file apart."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fmoe_ray.errors import StoreError

_RETRY_S = 0.05  # flock has no time-out, so a held lock is asked for again this often


@contextmanager
def lock_beside(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock of `path`, a file beside it that stays: the file itself is replaced under it.

    Raises StoreError if it cannot be had within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise StoreError(f"{lock}: cannot be opened: {error.strerror}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"{path}: another process has been writing it for {timeout_s:g} s"
                    ) from error
                time.sleep(_RETRY_S)
        yield
