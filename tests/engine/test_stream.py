"""When the events of a stream are handed over, on a clock that only the test moves."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from fmoe_ray.engine.request import Event
from fmoe_ray.engine.stream import EventStream

INTERVAL_S = 0.004


class TestLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, then jumps to the next timer."""

    __test__ = False
    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    async def at(self, seconds: float) -> None:
        await asyncio.sleep(100 + seconds - self.now_s)

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def play(
    tokens: list[tuple[float, int, str]],
    interval_s: float = INTERVAL_S,
    num_requests: int = 1,
) -> list[tuple[float, int, str]]:
    """Puts letters in at times; "." ends a request. Returns what came out, and when."""
    out: list[tuple[float, int, str]] = []

    async def run(loop: TestLoop) -> None:
        stream = EventStream(num_requests, lambda: None, interval_s=interval_s)

        async def put_all() -> None:
            for seconds, index, text in tokens:
                await loop.at(seconds)
                reason = "stop" if text == "." else None
                stream.put(Event(index=index, text=text, finish_reason=reason))  # type: ignore[arg-type]

        putting = asyncio.create_task(put_all())
        async for event in stream:
            out.append((round(loop.now_s - 100, 6), event.index, event.text))
        await putting

    on_test_loop(run)
    return out


def on_test_loop(body: Callable[[TestLoop], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=TestLoop) as runner:

        async def run() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, TestLoop)
            await body(loop)

        runner.run(run())


def test_the_first_token_and_one_that_comes_late_are_not_held_back() -> None:
    letters = [(0.0, 0, "a"), (0.004, 0, "b"), (0.009, 0, "c"), (0.5, 0, "d"), (0.6, 0, ".")]
    assert play(letters) == letters


def test_tokens_that_come_within_the_interval_are_one_event_when_it_is_over() -> None:
    letters = [(0.0, 0, "a"), (0.001, 0, "b"), (0.002, 0, "c"), (0.0035, 0, "d"), (0.006, 0, "e")]
    assert play([*letters, (0.1, 0, ".")]) == [
        (0.0, 0, "a"),
        (0.004, 0, "bcd"),
        (0.008, 0, "e"),
        (0.1, 0, "."),
    ]


def test_the_end_is_not_held_back() -> None:
    assert play([(0.0, 0, "a"), (0.001, 0, "b"), (0.002, 0, ".")]) == [
        (0.0, 0, "a"),
        (0.002, 0, "b."),
    ]


def test_each_request_has_its_own_interval() -> None:
    letters = [(0.0, 0, "a"), (0.001, 1, "x"), (0.002, 0, "b"), (0.003, 1, "y")]
    assert play([*letters, (0.1, 0, "."), (0.1, 1, ".")], num_requests=2) == [
        (0.0, 0, "a"),
        (0.001, 1, "x"),
        (0.004, 0, "b"),
        (0.005, 1, "y"),
        (0.1, 0, "."),
        (0.1, 1, "."),
    ]


def test_without_an_interval_every_token_is_alone() -> None:
    letters = [(n / 10_000, 0, letter) for n, letter in enumerate("abc.")]
    assert play(letters, interval_s=0.0) == letters


def test_an_infinite_interval_gives_the_first_token_and_the_rest() -> None:
    letters = [(float(n), 0, letter) for n, letter in enumerate("abc.")]
    assert play(letters, interval_s=math.inf) == [(0.0, 0, "a"), (3.0, 0, "bc.")]


def test_nothing_runs_while_tokens_are_held_back() -> None:
    """No polling: one timer, however many tokens come meanwhile."""

    async def body(loop: TestLoop) -> None:
        stream = EventStream(1, lambda: None, interval_s=1.0)
        stream.put(Event(text="a"))
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await loop.at(0.1)
        stream.put(Event(text="b"))
        await loop.at(0.2)
        for _ in range(100):
            stream.put(Event(text="c"))
            await asyncio.sleep(0)
            assert not loop._ready  # type: ignore[attr-defined]
        assert (await reading).text == "b" + "c" * 100
        assert loop.now_s == pytest.approx(101.0)

    on_test_loop(body)


def test_closing_ends_an_iteration_that_waits() -> None:
    async def body(loop: TestLoop) -> None:
        cancelled: list[bool] = []
        stream = EventStream(2, lambda: cancelled.append(True))
        reading = asyncio.ensure_future(anext(stream, None))
        within = asyncio.ensure_future(EventStream.next_within(stream, 50.0))
        await loop.at(0.1)
        stream.close()
        assert await reading is None and await within is None
        assert loop.now_s == pytest.approx(100.1) and cancelled == [True]

    on_test_loop(body)
