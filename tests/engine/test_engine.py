"""The loop around the scheduler: events, cancelling, failures, progress."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fmoe_ray.config import EngineSettings
from fmoe_ray.engine.engine import MAX_FAILED_STEPS, Engine
from fmoe_ray.engine.messages import Sampling, StepPlan, StepResult
from fmoe_ray.engine.request import Event, GenerationRequest, Usage
from fmoe_ray.engine.stream import EventStream
from fmoe_ray.engine.stub_runner import StubRunner, StubTokenizer
from fmoe_ray.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    ShardLostError,
    StepTimeoutError,
    UnavailableError,
)

LIMIT_S = 10.0


def request(prompt: str = "w", **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt=list(prompt.encode()),
        sampling=Sampling(temperature=0),
        **fields,
    )


def with_engine(
    body: Callable[[Engine], Awaitable[None]],
    runner: StubRunner | None = None,
    settings: EngineSettings | None = None,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine = Engine(
                runner or StubRunner(num_slots=2), StubTokenizer(), settings or EngineSettings()
            )
            async with engine:
                await body(engine)
                engine.check_integrity()

    asyncio.run(run())


async def whole(stream: EventStream) -> Event:
    result = Event()
    async for event in stream:
        result.absorb(event)
    return result


class GatedRunner(StubRunner):
    """Computes a step only when it is let; or never again."""

    def __init__(self) -> None:
        super().__init__(num_slots=2)
        self.gate = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.error: EngineError | None = None

    async def step(self, plan: StepPlan) -> StepResult:
        self.has_begun.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().step(plan)


def test_a_reader_gets_every_token_and_the_reason_of_the_end() -> None:
    async def body(engine: Engine) -> None:
        event = await whole(engine.submit(request()))
        assert (event.text, event.finish_reason) == ("xyz", "stop")
        assert event.usage is not None and event.usage.completion_tokens == 4

    with_engine(body)


def test_requests_submitted_together_are_told_apart() -> None:
    async def body(engine: Engine) -> None:
        texts = {0: "", 1: "", 2: ""}
        async for event in engine.submit(request("w"), request("x"), request("y")):
            texts[event.index] += event.text
        assert texts == {0: "xyz", 1: "yz", 2: "z"}

    with_engine(body)


def test_a_slow_reader_finds_everything_in_one_event() -> None:
    async def body(engine: Engine) -> None:
        stream = engine.submit(request())
        while engine.health().num_running + engine.health().num_waiting > 0:
            await asyncio.sleep(0)
        event = await anext(stream)
        assert (event.text, event.finish_reason) == ("xyz", "stop")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_engine(body)


def test_closing_the_stream_frees_the_slot_within_a_step() -> None:
    async def body(engine: Engine) -> None:
        with engine.submit(request("a", ignore_eos=True)) as stream:
            await anext(stream)
            assert engine.health().num_running == 1
        num_steps = engine.health().num_steps
        while engine.health().num_running:
            await asyncio.sleep(0)
        assert engine.health().num_steps <= num_steps + 1

    with_engine(body)


def test_requests_submitted_together_are_admitted_all_or_none() -> None:
    async def body(engine: Engine) -> None:
        with pytest.raises(OverloadedError):
            engine.submit(*[request()] * 4)
        assert engine.health().num_waiting == 0
        assert len((await whole(engine.submit(*[request()] * 3))).text) == 9

    with_engine(body, settings=EngineSettings(max_waiting=1))


def test_no_event_in_time_leaves_the_request_running() -> None:
    async def body(engine: Engine) -> None:
        runner.has_begun.clear()
        stream = engine.submit(request())
        assert await stream.next_within(0.01) is None
        runner.gate.set()
        assert (await whole(stream)).text == "xyz"

    runner = GatedRunner()
    with_engine(body, runner)


def test_a_runner_that_gives_up_ends_all_requests_and_refuses_new_ones() -> None:
    async def body(engine: Engine) -> None:
        streams = [engine.submit(request()) for _ in range(4)]
        runner.error = EngineError("the device is gone")
        runner.gate.set()
        for stream in streams:
            event = await whole(stream)
            assert event.finish_reason == "error" and event.error is runner.error
        with pytest.raises(UnavailableError, match="the device is gone"):
            engine.submit(request())
        with pytest.raises(EngineError, match="the device is gone"):
            engine.check_health()
        assert await engine.failed() is runner.error

    runner = GatedRunner()
    with_engine(body, runner)


def test_a_defect_in_the_runner_leaves_nobody_waiting() -> None:
    class Broken(StubRunner):
        async def step(self, plan: StepPlan) -> StepResult:
            raise ZeroDivisionError("one over nothing")

    async def body(engine: Engine) -> None:
        event = await whole(engine.submit(request()))
        assert isinstance(event.error, EngineError) and "one over nothing" in str(event.error)

    with_engine(body, Broken())


class FailingRunner(StubRunner):
    """Steps with rows fail in this order; all succeed after the last."""

    def __init__(self, fails: list[bool]) -> None:
        super().__init__(num_slots=2)
        self._fails = fails

    async def step(self, plan: StepPlan) -> StepResult:
        result = await super().step(plan)
        fails = bool(plan.rows and self._fails) and self._fails.pop(0)
        return msgspec.structs.replace(result, rows=[], error="no luck") if fails else result


def test_an_engine_whose_steps_all_fail_gives_up() -> None:
    async def body(engine: Engine) -> None:
        for _ in range(MAX_FAILED_STEPS):
            engine.check_health()
            event = await whole(engine.submit(request()))
            assert isinstance(event.error, EngineError) and str(event.error) == "no luck"
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="5 steps in a row failed; the last: no luck"):
            engine.check_health()
        assert "no luck" in str(await engine.failed())

    with_engine(body, FailingRunner([True] * MAX_FAILED_STEPS))


def test_a_step_that_succeeds_forgives_those_that_failed() -> None:
    async def body(engine: Engine) -> None:
        for _ in range(2 * MAX_FAILED_STEPS):
            await whole(engine.submit(request("z")))
        engine.check_health()

    fails = [True] * (MAX_FAILED_STEPS - 1)
    with_engine(body, FailingRunner([*fails, False, *fails, False]))


def test_a_lost_shard_ends_requests_at_once_though_the_step_hangs() -> None:
    async def body(engine: Engine) -> None:
        stream = engine.submit(request())
        await runner.has_begun.wait()
        engine.fail(ShardLostError("shard 0 died"))
        event = await anext(stream)
        assert isinstance(event.error, ShardLostError)

    runner = GatedRunner()
    with_engine(body, runner)


def test_a_step_without_a_result_fails_the_engine() -> None:
    async def body(engine: Engine) -> None:
        event = await whole(engine.submit(request()))
        assert isinstance(event.error, StepTimeoutError)
        assert "engine.step_timeout_s" in str(event.error)

    with_engine(body, GatedRunner(), EngineSettings(step_timeout_s=0.05))


def test_health_is_about_progress() -> None:
    async def run() -> None:
        now = 0.0
        runner = GatedRunner()
        engine = Engine(
            runner, StubTokenizer(), EngineSettings(step_timeout_s=5.0), clock=lambda: now
        )
        async with engine:
            now = 100.0
            engine.check_health()  # idle for long is healthy
            engine.submit(request())
            await runner.has_begun.wait()
            now = 104.0
            engine.check_health()
            now = 106.0
            assert engine.health().step_age_s == 6.0
            with pytest.raises(StepTimeoutError):
                engine.check_health()

    asyncio.run(run())


def test_closing_ends_what_is_left_with_an_error() -> None:
    async def run() -> None:
        engine = Engine(GatedRunner(), StubTokenizer(), EngineSettings())
        await engine.start()
        stream = engine.submit(request())
        await engine.close()
        assert isinstance((await whole(stream)).error, UnavailableError)

    asyncio.run(run())


class CountingObserver:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        pass

    def request_ended(self, reason: str, usage: Usage) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("bad", ["", "x"])
def test_a_refusal_of_all_or_none_counts_nothing(bad: str) -> None:
    """The second of two is wrong, or one too many: the first was never there."""

    async def run() -> None:
        observer = CountingObserver()
        settings = EngineSettings(max_waiting=0)
        runner = StubRunner(num_slots=1)
        async with Engine(runner, StubTokenizer(), settings, observers=(observer,)) as engine:
            with pytest.raises((InvalidRequestError, OverloadedError)):
                engine.submit(request(), request(bad))
            assert engine.health().num_waiting == 0
            assert observer.reasons == []
            assert (await whole(engine.submit(request()))).text == "xyz"
            engine.check_integrity()

    asyncio.run(run())
