import threading
from collections.abc import Iterator

import pytest

from fmoe_ray.actors.in_time import in_time


def test_items_and_errors_come_through_in_order() -> None:
    def items() -> Iterator[int | None]:
        yield from (1, None, 2)
        raise KeyError("broken")

    seen: list[int | None] = []
    with pytest.raises(KeyError, match="broken"):
        seen.extend(in_time(items(), 5))
    assert seen == [1, None, 2]
    assert list(in_time([], 5)) == []


def test_silence_ends_the_reading() -> None:
    goes_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        goes_on.wait(20)

    reading = in_time(items(), 0.1)
    assert next(reading) == 1
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.1 s"):
        next(reading)
    goes_on.set()
