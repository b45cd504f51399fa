"""One line on stderr that says what a long command is doing, where stderr is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
