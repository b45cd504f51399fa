"""The thread that keeps a router's maps up to date: what it survives, and when it ends."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import RaySystemError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID

from fmoe_ray.actors.prompt_maps import PromptMaps
from fmoe_ray.actors.router import ExpertAffinityRouter
from fmoe_ray.engine.map_exchange import Update, Version
from fmoe_ray.errors import FingerprintError, StoreError, StoreUnavailableError
from fmoe_ray.maps.named import NamedMaps, NamedStore
from fmoe_ray.maps.store import MapStore

LIMIT_S = 20.0
TOKENS = list(range(300))
QUESTION = {"prompt": "Is there a train to Cambridge?"}


def maps_of(num_experts: int) -> NamedMaps:
    """One map for each of the first tokens."""
    named = NamedStore(MapStore(num_layers=2, num_experts=num_experts, top_k=1, capacity=300))
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(num_experts), (len(TOKENS), 2)).astype(np.float32)
    named.store.insert(probs, token_ids=np.array(TOKENS, np.int32))
    named.refresh()
    return named.read(sorted(named.names))


class Replies:
    """A store that answers with these in turn, and then with the last again and again."""

    def __init__(self, *replies: Exception | Update) -> None:
        self._replies = list(replies)
        self.num_asked = 0

    def __call__(self, model: str, reader: str, since: Version) -> Update:
        self.num_asked += 1
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


def update(num_experts: int, life: int) -> Update:
    version = Version(life=life, number=1)
    return Update(version=version, num_taken=0, maps=[maps_of(num_experts)])


def within(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
        time.sleep(0.01)


def is_running() -> bool:
    return any(thread.name == "prompt-maps" for thread in threading.enumerate())


Start = Callable[..., PromptMaps]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[PromptMaps] = []

    def make(replies: Replies, path: str = "tiny") -> PromptMaps:
        prompts = PromptMaps(path, "model", fetch=replies, every_s=0.01)
        started.append(prompts)
        prompts.start()
        return prompts

    yield make
    for prompts in started:
        prompts.close()
    within(lambda: not is_running())


@pytest.mark.parametrize(
    ("error", "num_warnings"),
    [
        (StoreUnavailableError("none yet"), 0),
        (StoreError("maps were refused"), 1),
        (FingerprintError("another model"), 1),
        (RaySystemError("a defect in the store"), 1),
    ],
)
def test_an_error_of_the_store_does_not_end_routing(
    error: Exception, num_warnings: int, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = start(Replies(error, error, error, update(4, 1)))
    within(lambda: prompts.predict(QUESTION) is not None)
    assert caplog.text.count("requests are not routed") == num_warnings


def test_maps_of_an_earlier_life_of_the_store_are_forgotten(start: Start) -> None:
    replies = Replies(update(4, 1), update(6, 2))
    prompts = start(replies)

    def width() -> int:
        probs_LJ = prompts.predict(QUESTION)
        return 0 if probs_LJ is None else probs_LJ.shape[1]

    within(lambda: width() == 6)


def test_a_damaged_tokenizer_is_told(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    replies = Replies(update(4, 1))
    start(replies, str(tmp_path))
    within(lambda: not is_running())
    assert "no tokenizer.json" in caplog.text and replies.num_asked == 0


@pytest.mark.ray
def test_the_thread_ends_with_its_router(cluster: str) -> None:
    router = ExpertAffinityRouter(DeploymentID(name="replica"), DeploymentHandleSource.PROXY)
    router.initialize_state(max_lead=2, model_path="tiny", model_name="nobody's")
    time.sleep(0.5)
    assert is_running()
    del router
    gc.collect()
    within(lambda: not is_running())
