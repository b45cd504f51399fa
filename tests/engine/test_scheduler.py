"""The laws of the scheduler: order, slots, pieces of prompts, and that everything ends once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ray.engine.messages import Sampling, StepPlan, StepResult, StepStats
from fmoe_ray.engine.request import Event, GenerationRequest
from fmoe_ray.engine.scheduler import Events, Scheduler
from fmoe_ray.engine.stub_runner import StubRunner, StubTokenizer
from fmoe_ray.errors import DeadlineError, EngineError, InvalidRequestError, OverloadedError

GREEDY = Sampling(temperature=0)


@dataclass
class World:
    """A scheduler, a runner that checks its plans, and what every request was told."""

    num_slots: int = 2
    max_waiting: int = 8
    max_prefill_tokens: int = 8
    max_context: int = 64
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    told: dict[int, Event] = field(default_factory=dict)
    num_ends: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = StubRunner(
            num_slots=self.num_slots,
            max_context=self.max_context,
            max_prefill_tokens=self.max_prefill_tokens,
        )
        self.scheduler = Scheduler(self.runner.info, StubTokenizer(), max_waiting=self.max_waiting)

    def submit(
        self, prompt: str | list[int] = "a", *, timeout_s: float = 1e9, **fields: Any
    ) -> int:
        tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
        request = GenerationRequest(prompt=tokens, sampling=GREEDY, **fields)
        return self.scheduler.submit(request, now=self.now, timeout_s=timeout_s)

    def note(self, events: Events) -> None:
        for request_id, event in events:
            assert request_id not in self.num_ends, "an event after the end"
            self.told.setdefault(request_id, Event()).absorb(event)
            if event.finish_reason is not None:
                assert event.usage is not None
                self.num_ends[request_id] = 1

    def step(self, change: Callable[[StepResult], StepResult] = lambda result: result) -> bool:
        self.now += 1
        self.note(self.scheduler.expire(self.now))
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.plans.append(plan)
        self.scheduler.check_integrity()
        result = asyncio.run(self.runner.step(plan))
        self.note(self.scheduler.take(change(result), self.now))
        self.scheduler.check_integrity()
        return True

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("requests that never end")

    def text(self, request_id: int) -> str:
        return self.told[request_id].text

    def reason(self, request_id: int) -> str | None:
        return self.told[request_id].finish_reason


def alphabet_after(letter: str, max_tokens: int, stop: tuple[str, ...]) -> str:
    """What the stub answers, by the plain rule."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    text = alphabet[alphabet.index(letter) + 1 :][:max_tokens]
    ends = [text.index(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text


REQUEST = st.fixed_dictionaries(
    {
        "length": st.integers(1, 30),
        "letter": st.sampled_from("amwz"),
        "max_tokens": st.integers(1, 30),
        "stop": st.sampled_from([(), ("cd",), ("xyz", "q")]),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), REQUEST),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(1, 4), st.integers(1, 12))
def test_every_admitted_request_ends_once_with_an_answer_of_its_own(
    operations: list[tuple[str, Any]], num_slots: int, max_prefill_tokens: int
) -> None:
    world = World(num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
    asked: dict[int, dict[str, Any]] = {}
    disturbed: set[int] = set()
    for name, argument in operations:
        if name == "submit":
            try:
                request_id = world.submit(
                    "." * (argument["length"] - 1) + argument["letter"],
                    max_tokens=argument["max_tokens"],
                    stop=argument["stop"],
                )
            except OverloadedError:
                continue
            asked[request_id] = argument
        elif name == "cancel":
            world.note(world.scheduler.cancel(argument))
            disturbed.add(argument)
        elif name == "step":
            world.step()
        elif world.step(failed):
            disturbed.update(row.request_id for row in world.plans[-1].rows)
    world.finish()
    assert set(world.num_ends) == set(asked)
    assert world.scheduler.num_free_slots == num_slots
    for request_id, argument in asked.items():
        if request_id not in disturbed:
            rule = argument["letter"], argument["max_tokens"], argument["stop"]
            assert world.text(request_id) == alphabet_after(*rule)


def failed(result: StepResult) -> StepResult:
    stats = StepStats(
        seconds=0,
        stall_seconds=0,
        bytes_on_demand=0,
        bytes_prefetched=0,
        hits=0,
        late=0,
        misses=0,
    )
    return StepResult(step=result.step, rows=[], stats=stats, error="the device is on fire")


def first_steps(world: World) -> dict[int, int]:
    first: dict[int, int] = {}
    for plan in world.plans:
        for row in plan.rows:
            first.setdefault(row.request_id, plan.step)
    return first


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_requests_begin_in_the_order_of_arrival(lengths: list[int]) -> None:
    world = World(num_slots=3)
    ids = [world.submit("." * length, max_tokens=3) for length in lengths]
    world.finish()
    begun = first_steps(world)
    assert [begun[i] for i in ids] == sorted(begun[i] for i in ids)


def test_prompts_that_fit_together_are_prefilled_in_one_step_beside_the_decodes() -> None:
    world = World(num_slots=4, max_prefill_tokens=8)
    world.submit("aaa")
    world.step()
    world.submit("bbbb")
    world.submit("cccc")
    world.submit("d")  # has no room among the 8 prompt tokens
    world.step()
    assert [len(row.tokens) for row in world.plans[-1].rows] == [1, 4, 4]
    world.step()
    assert [len(row.tokens) for row in world.plans[-1].rows] == [1, 1, 1, 1]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
def test_a_prompt_is_always_computed_in_the_same_pieces(
    length: int, max_prefill_tokens: int, num_others: int
) -> None:
    world = World(num_slots=4, max_prefill_tokens=max_prefill_tokens)
    for _ in range(num_others):
        world.submit("." * min(3, max_prefill_tokens), max_tokens=5)
    request_id = world.submit("." * length, max_tokens=1)
    world.finish()
    rows = [row for plan in world.plans for row in plan.rows if row.request_id == request_id]
    full, rest = divmod(length, max_prefill_tokens)
    assert [len(row.tokens) for row in rows] == [max_prefill_tokens] * full + [rest] * (rest > 0)
    assert [row.samples for row in rows] == [False] * (len(rows) - 1) + [True]


def test_sampling_is_sent_with_the_first_row_only() -> None:
    world = World(max_prefill_tokens=2)
    world.submit("aaaaa", max_tokens=2)
    world.finish()
    assert [plan.rows[0].sampling for plan in world.plans] == [GREEDY, None, None, None]


def test_a_slot_is_free_in_the_step_after_its_request_ended() -> None:
    world = World(num_slots=1)
    world.submit("a", max_tokens=1)
    second = world.submit("a", max_tokens=1)
    world.step()
    world.step()
    assert [row.request_id for row in world.plans[-1].rows] == [second]
    assert world.plans[-1].ended == [1]


def test_tokens_in_flight_are_those_in_slots_and_those_that_wait() -> None:
    world = World(num_slots=1, max_prefill_tokens=4)
    world.submit("aaaaa", max_tokens=3)
    world.submit("aa", max_tokens=1)
    seen = [world.scheduler.num_tokens]
    while world.step():
        seen.append(world.scheduler.num_tokens)
    # 5 + 2; the prompt in two pieces; one token more a step; then the second request alone
    assert seen == [7, 7, 7, 8, 2, 0]


def test_a_cancelled_request_leaves_with_the_step_in_flight() -> None:
    world = World(num_slots=1)
    running, waiting = world.submit("a"), world.submit("a")
    plan = world.scheduler.plan(1.0)
    assert plan is not None
    assert world.scheduler.cancel(running) == []
    assert [event.finish_reason for _, event in world.scheduler.cancel(waiting)] == ["cancelled"]
    events = world.scheduler.take(asyncio.run(world.runner.step(plan)), 2.0)
    assert [(i, event.finish_reason) for i, event in events] == [(running, "cancelled")]
    assert world.scheduler.num_free_slots == 1


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"prompt": list(b"w")}, "xyz", "stop"),
        ({"prompt": list(b"a"), "max_tokens": 3}, "bcd", "length"),
        ({"prompt": list(b"a"), "stop": ("de",)}, "bc", "stop"),
        ({"prompt": list(b"a"), "stop": ("dz",), "max_tokens": 3}, "bcd", "length"),
        ({"prompt": list(b"y"), "stop": ("zz",)}, "z", "stop"),
        ({"prompt": list(b"y"), "ignore_eos": True, "max_tokens": 4}, "zab", "length"),
        ({"prompt": list(b"." * 61)}, "abc", "length"),
    ],
)
def test_an_answer_ends_for_the_right_reason(
    fields: dict[str, Any], text: str, reason: str
) -> None:
    world = World(max_context=64, max_prefill_tokens=64)
    request_id = world.submit(**fields)
    world.finish()
    assert (world.text(request_id), world.reason(request_id)) == (text, reason)


def test_token_ids_hold_everything_the_model_chose() -> None:
    world = World()
    stopped, ended = world.submit("a", stop=("de",)), world.submit("y")
    world.finish()
    assert world.told[stopped].token_ids == list(b"bcde")
    assert world.told[ended].token_ids == [ord("z"), 256]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), ([1] * 64, "at most 63"), ([1, 999], "token 999"), ([-1], "token -1")],
)
def test_a_prompt_that_cannot_be_computed_is_refused(prompt: list[int], words: str) -> None:
    world = World()
    with pytest.raises(InvalidRequestError, match=words):
        world.submit(prompt=prompt)
    assert world.scheduler.is_idle


def test_overload_counts_those_who_would_wait() -> None:
    world = World(num_slots=2, max_waiting=1)
    for _ in range(3):
        world.submit()
    with pytest.raises(OverloadedError, match=r"engine\.max_waiting is 1"):
        world.submit()
    world.step()
    with pytest.raises(OverloadedError):
        world.submit()
    world.finish()
    world.submit()


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    world = World(num_slots=1)
    running = world.submit("a", timeout_s=3.5)
    waiting = world.submit("a", timeout_s=2.5)
    world.finish()
    for request_id, num_tokens in ((running, 3), (waiting, 0)):
        event = world.told[request_id]
        assert event.finish_reason == "error" and isinstance(event.error, DeadlineError)
        assert f"{num_tokens} tokens" in str(event.error)


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    world = World(num_slots=1)
    failing, waiting = world.submit("a"), world.submit("w")
    world.step(failed)
    world.finish()
    assert isinstance(world.told[failing].error, EngineError)
    assert "on fire" in str(world.told[failing].error)
    assert world.text(waiting) == "xyz"


def test_a_failed_row_ends_its_request_and_no_others() -> None:
    world = World(num_slots=2)
    failing, other = world.submit("a"), world.submit("w")

    def spoil(result: StepResult) -> StepResult:
        first = msgspec.structs.replace(result.rows[0], token=None, error="not a number")
        return msgspec.structs.replace(result, rows=[first, *result.rows[1:]])

    world.step(spoil)
    world.finish()
    assert "not a number" in str(world.told[failing].error)
    assert world.text(other) == "xyz"


def test_an_answer_to_another_step_is_refused() -> None:
    world = World()
    world.submit()
    plan = world.scheduler.plan(0.0)
    assert plan is not None
    result = asyncio.run(world.runner.step(StepPlan(step=7, rows=plan.rows)))
    with pytest.raises(EngineError, match="answered by step 7"):
        world.scheduler.take(result, 0.0)


def test_usage_adds_up() -> None:
    world = World(num_slots=2)
    first, second = world.submit("aaaa", max_tokens=3), world.submit("b", max_tokens=3)
    world.finish()
    usages = [world.told[i].usage for i in (first, second)]
    assert all(usage is not None for usage in usages)
    num_bytes = sum(usage.num_bytes for usage in usages if usage)
    assert num_bytes == 1024 * (4 + 1 + 2 * 2)
    usage = world.told[first].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.misses) == (4, 3, 6)
    assert (usage.queue_s, usage.ttft_s, usage.tpot_s) == (1.0, 1.0, 1.0)
