"""Two shards of the demonstration model on a real cluster: tokens, a killed shard, leftovers."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fmoe_ray.config import Settings, load_settings
from fmoe_ray.doctor import examine
from fmoe_ray.engine.backend import Progress
from fmoe_ray.engine.seat import ONLY_SEAT, Seat
from fmoe_ray.engine.stub_runner import StubBackend, StubRunner
from fmoe_ray.errors import EngineError

pytestmark = pytest.mark.ray

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-2-shards.yaml"
PROMPTS = ["Once upon a time", "The cat"]
NUM_TOKENS = 24


def within(seconds: float, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def handle(cluster: str) -> Iterator[Any]:
    """The application; its end must leave no process, placement group or shared memory."""
    from ray import serve
    from ray.util import placement_group_table

    from fmoe_ray.actors.app import build_app

    def num_groups() -> int:
        return sum(g["state"] == "CREATED" for g in placement_group_table().values())

    groups_before, unused_before = num_groups(), unused_stores()
    handle = serve.run(build_app(load_settings(CONFIG)), name="two", route_prefix="/two")
    yield handle
    pids = handle.shard_pids.remote().result(timeout_s=10)
    assert num_groups() == groups_before + 1
    serve.delete("two")
    within(10, lambda: not any(is_alive(pid) for pid in pids))
    within(10, lambda: num_groups() == groups_before)
    within(5, lambda: unused_stores() <= unused_before)


@pytest.fixture
def client(cluster: str, handle: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{cluster}/two", timeout=60) as client:
        yield client


def unused_stores() -> set[str]:
    """Host stores in shared memory that no process uses."""
    return {finding.value for finding in examine() if finding.name == "stale store"}


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **fields,
    }


def texts_of_one_shard() -> list[str]:
    from fmoe_ray.engine.backend import ModelBackend
    from fmoe_ray.engine.step_runner import StepRunner
    from fmoe_ray.evaluate.drive import Drive

    settings = load_settings(CONFIG.with_name("tiny.yaml"))
    tokenizer = ModelBackend().load_tokenizer(settings)
    runner = StepRunner.load(settings)
    answers = Drive(runner)([tokenizer.encode(prompt) for prompt in PROMPTS], NUM_TOKENS)
    runner.shutdown()
    return [tokenizer.decode(answer) for answer in answers]


def test_greedy_tokens_are_those_of_one_shard(client: httpx.Client) -> None:
    responses = [client.post("/v1/completions", json=body(prompt)) for prompt in PROMPTS]
    texts = [response.json()["choices"][0]["text"] for response in responses]
    assert texts == texts_of_one_shard()


def test_a_client_that_leaves_frees_its_slot_within_a_step(client: httpx.Client) -> None:
    with client.stream(
        "POST", "/v1/completions", json=body(PROMPTS[0], max_tokens=400, stream=True)
    ) as response:
        next(response.iter_lines())
        assert client.get("/health").json()["num_running"] == 1
    left_at = client.get("/health").json()["num_steps"]
    freed = within(5, lambda: _health_if_free(client))
    assert freed["num_steps"] <= left_at + 2  # the step that was in flight, and one just begun


def _health_if_free(client: httpx.Client) -> Any:
    health = client.get("/health").json()
    return health if health["num_running"] == 0 else None


@dataclass(frozen=True)
class LonelyBackend(StubBackend):
    """Its second shard does not find the first."""

    def load_runner(
        self, settings: Settings, progress: Progress | None = None, seat: Seat = ONLY_SEAT
    ) -> StubRunner:
        if seat.rank == 1:
            raise EngineError(f"shard 1 did not meet all 2 shards at {seat.host}:{seat.port}")
        return super().load_runner(settings, progress, seat)


def test_shards_that_do_not_meet_are_in_the_status_of_the_application(cluster: str) -> None:
    from ray import serve

    from fmoe_ray.actors.app import build_with

    with pytest.raises(RuntimeError):
        application = build_with(load_settings(CONFIG), LonelyBackend())
        serve.run(application, name="lonely", route_prefix="/lonely")
    message = serve.status().applications["lonely"].deployments["Replica"].message
    assert re.search(r"shard 1 did not meet all 2 shards at [0-9.]+:[1-9]\d+", message)
    serve.delete("lonely")


def read_stream(
    client: httpx.Client, request: dict[str, Any], has_token: threading.Event
) -> list[str]:
    events = []
    with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        for line in response.iter_lines():
            if line:
                events.append(line)
                has_token.set()
    return events


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_shard_fails_what_is_in_flight_and_the_rest_is_served_by_the_replacement(
    rank: int, client: httpx.Client, handle: Any
) -> None:
    before = client.get("/health").json()["replica"]
    pids = handle.shard_pids.remote().result(timeout_s=10)
    long = body(PROMPTS[0], max_tokens=480)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, "/v1/completions", json=long)
        has_token = threading.Event()
        streamed = pool.submit(read_stream, client, long, has_token)
        assert has_token.wait(10)
        within(10, lambda: client.get("/health").json()["num_running"] == 2)
        os.kill(pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        response, events = whole.result(10), streamed.result(10)
    assert time.monotonic() - killed < 3  # wide enough for a busy machine
    assert response.status_code == 503
    assert "expert shard" in response.json()["error"]["message"]
    assert "expert shard" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]

    def is_replaced() -> bool:
        response = client.get("/health")
        return response.status_code == 200 and response.json()["replica"] != before

    within(120, is_replaced)
    assert not any(is_alive(pid) for pid in pids)
    response = client.post("/v1/completions", json=body(PROMPTS[0]))
    assert response.json()["usage"]["completion_tokens"] == NUM_TOKENS
