"""The engine: a loop that keeps one step in flight and hands each request its events.

Lives on one asyncio loop. Knows neither HTTP nor how a step is carried out.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fmoe_ray.config import EngineSettings
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.request import GenerationRequest, Usage
from fmoe_ray.engine.runner import Runner, RunnerInfo
from fmoe_ray.engine.scheduler import Events, Scheduler
from fmoe_ray.engine.stream import EventStream
from fmoe_ray.engine.tokenizer import Tokenizer
from fmoe_ray.errors import EngineError, FmoeError, StepTimeoutError, UnavailableError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 5
"""In a row. One alone may be the fault of what it computed; so many are the machine's."""


class EngineObserver(Protocol):
    """Told what happens, for metrics. Called on the engine's loop: must not wait or raise."""

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None: ...

    def request_ended(self, reason: str, usage: Usage) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    num_running: int
    num_waiting: int
    num_tokens: int
    """Of requests running and waiting: in KV slots, or in prompts to be computed."""
    num_free_slots: int
    num_steps: int
    step_age_s: float
    """How long the step in flight has been computed; 0 if there is none."""
    failure: str | None
    """Why no later step can succeed."""


class Engine:
    """Continuous batching over a runner.

    Use as `async with Engine(...) as engine`, or call `start` and `close`.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        *,
        observers: tuple[EngineObserver, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._observers = observers
        self._clock = clock
        self._scheduler = Scheduler(runner.info, tokenizer, max_waiting=settings.max_waiting)
        self._readers: dict[int, tuple[EventStream, int]] = {}
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._num_steps = 0
        self._num_failed_in_a_row = 0
        self._step_began_s: float | None = None
        self._failure: FmoeError | None = None
        self._has_failed = asyncio.Event()
        self.tokenizer = tokenizer

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def max_requests(self) -> int:
        """Requests that can be running and waiting at the same time."""
        return self._runner.info.num_slots + self._settings.max_waiting

    async def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name="engine-steps")
        self._loop_task.add_done_callback(self._on_loop_end)

    async def __aenter__(self) -> "Engine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def submit(self, *requests: GenerationRequest, interval_s: float = 0.0) -> EventStream:
        """Queues requests, all or none. Iterate over the result; close it to cancel.

        What a request generates within `interval_s` of its event before is in one event. Raises
        InvalidRequestError, OverloadedError, and UnavailableError once the engine has failed.
        """
        if self._failure is not None:
            raise UnavailableError(f"this replica has stopped: {self._failure}")
        self._scheduler.check(*requests)
        now, timeout_s = self._clock(), self._settings.request_timeout_s
        ids = [self._scheduler.submit(r, now=now, timeout_s=timeout_s) for r in requests]
        stream = EventStream(len(ids), lambda: self._cancel(ids), interval_s=interval_s)
        for index, request_id in enumerate(ids):
            self._readers[request_id] = (stream, index)
        self._work.set()
        return stream

    def fail(self, error: FmoeError) -> None:
        """Ends every request with `error` at once and refuses later ones with it."""
        if self._failure is None:
            logger.error("the engine stops: %s", error)
            self._end_all(error)

    async def failed(self) -> FmoeError:
        """Waits until no later step can succeed."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    def health(self) -> EngineHealth:
        """Cheap; looks at progress, not only at life."""
        began = self._step_began_s
        return EngineHealth(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_tokens=self._scheduler.num_tokens,
            num_free_slots=self._scheduler.num_free_slots,
            num_steps=self._num_steps,
            step_age_s=0.0 if began is None else self._clock() - began,
            failure=None if self._failure is None else str(self._failure),
        )

    def check_health(self) -> None:
        """Raises EngineError if the engine has failed or its step makes no progress."""
        health = self.health()
        if health.failure is not None:
            raise EngineError(health.failure)
        if health.step_age_s > self._settings.step_timeout_s:
            raise StepTimeoutError(f"no progress for {health.step_age_s:.0f} s")

    async def close(self) -> None:
        """Ends what is left with an error, then closes the runner."""
        if self._failure is None:
            self._end_all(UnavailableError("this replica has been shut down"))
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await self._runner.close()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()
        in_engine = self._scheduler.num_running + self._scheduler.num_waiting
        assert len(self._readers) <= in_engine, (len(self._readers), in_engine)

    async def _run(self) -> None:
        while self._failure is None:
            self._deliver(self._scheduler.expire(self._clock()))
            plan = self._scheduler.plan(self._clock())
            if plan is None:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                result = await self._step(plan)
                if self._failure is None:
                    self._take(plan, result)
            except EngineError as error:
                self.fail(error)

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """A defect must not leave requests waiting for a loop that is gone."""
        defect = None if task.cancelled() else task.exception()
        if defect is not None:
            logger.error("the engine's loop has a defect", exc_info=defect)
            self.fail(EngineError(f"the engine's loop has a defect: {defect!r}"))

    async def _step(self, plan: StepPlan) -> StepResult:
        self._step_began_s = self._clock()
        try:
            async with asyncio.timeout(self._settings.step_timeout_s):
                return await self._runner.step(plan)
        except TimeoutError as error:
            raise StepTimeoutError(
                f"step {plan.step} gave no result within {self._settings.step_timeout_s:g} s "
                "(engine.step_timeout_s)"
            ) from error
        finally:
            self._step_began_s = None

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        """Raises EngineError where step after step fails: another replica may do better."""
        if result.error is not None:
            logger.error("step %d failed: %s", plan.step, result.error)
            self._num_failed_in_a_row += 1
        elif plan.rows:  # a plan that only ends requests computes nothing
            self._num_failed_in_a_row = 0
        self._num_steps += 1
        events = self._scheduler.take(result, self._clock())
        for observer in self._observers:
            observer.step_done(plan, result, self._scheduler.num_waiting)
        self._deliver(events)
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineError(f"{MAX_FAILED_STEPS} steps in a row failed; the last: {result.error}")

    def _end_all(self, error: FmoeError) -> None:
        self._failure = error
        self._has_failed.set()
        self._deliver(self._scheduler.fail(error))
        self._work.set()

    def _cancel(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._readers.pop(request_id, None)
            self._deliver(self._scheduler.cancel(request_id))

    def _deliver(self, events: Events) -> None:
        for request_id, event in events:
            reader = self._readers.get(request_id)
            if event.finish_reason is not None:
                self._readers.pop(request_id, None)
                assert event.usage is not None
                for observer in self._observers:
                    observer.request_ended(event.finish_reason, event.usage)
            if reader is not None:
                stream, event.index = reader
                stream.put(event)
