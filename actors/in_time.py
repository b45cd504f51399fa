"""A blocking iterator whose reader does not wait for ever: Serve's has no time-out of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


def in_time(items: Iterable[T], timeout_s: float) -> Iterator[T]:
    """The items, read by a thread that ends with them, or with the process.

    Raises TimeoutError if none comes for `timeout_s`, and what the iterator raises.
    """
    arrived: SimpleQueue[_Item[T] | _End] = SimpleQueue()
    # Not of a pool: the interpreter would wait at its end for a thread that waits for ever.
    Thread(target=_pass_on, args=(items, arrived), name="fmoe-stream", daemon=True).start()
    while True:
        try:
            arrival = arrived.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"nothing came for {timeout_s:g} s") from None
        if isinstance(arrival, _Item):
            yield arrival.value
        elif arrival.error is not None:
            raise arrival.error
        else:
            return


def _pass_on(items: Iterable[T], arrived: "SimpleQueue[_Item[T] | _End]") -> None:
    try:
        for item in items:
            arrived.put(_Item(item))
    except Exception as error:  # whatever it is, the reader's thread raises it
        arrived.put(_End(error))
    else:
        arrived.put(_End(None))
