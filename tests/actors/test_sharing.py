"""Two replicas of one model on a real cluster, with the demonstration model: they share maps."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import fmoe_ray
from fmoe_ray.actors.map_link import RemoteMapStore, sharing_maps
from fmoe_ray.actors.map_store import StoreInfo
from fmoe_ray.client import Client
from fmoe_ray.config import Settings, parse_settings
from fmoe_ray.engine.stub_runner import StubRunner
from fmoe_ray.errors import ConfigError, FingerprintError, StoreUnavailableError
from fmoe_ray.maps.store import MapStore
from fmoe_ray.trace.prompts import read_prompts

pytestmark = pytest.mark.ray

MODEL = "shared"
LIMIT_S = 30.0
PROMPTS = Path(fmoe_ray.__file__).parent / "assets/prompts/prompts.jsonl"
NUM_TOKENS = 24


def settings(path: str, store_path: Path) -> Settings:
    return parse_settings(
        {
            "model": {"path": path, "served_name": MODEL, "device": "cpu"},
            "offload": {"policy": "fmoe", "budget": 0.25, "store_path": str(store_path)},
            "engine": {"max_batch_size": 4, "num_threads": 1},
            "shards": {"start_timeout_s": 120},
        }
    )


@dataclass
class Replicas:
    left: str
    right: str
    store_path: Path


@pytest.fixture(scope="module")
def replicas(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    from ray import serve

    from fmoe_ray.actors.app import build_app

    path = tmp_path_factory.mktemp("maps") / "maps"
    targets = [
        serve.RunTarget(build_app(settings("tiny", path)), name=name, route_prefix=f"/{name}")
        for name in ("left", "right")
    ]
    serve.run_many(targets)
    yield Replicas(f"{cluster}/left", f"{cluster}/right", path)
    for name in ("left", "right"):
        serve.delete(name)
    RemoteMapStore.get(MODEL).stop()


def within(seconds: float, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.05)
    return value


def ask(url: str, prompts: list[str]) -> int:
    """The number of tokens generated, which is also the number of maps learnt."""
    with Client(url) as client:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        answers = [client.chat(m, temperature=0, max_tokens=NUM_TOKENS) for m in messages]
    return sum(answer.usage["completion_tokens"] for answer in answers)


def numbers(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def mean_score(url: str, prompts: list[str]) -> float:
    """Of the predictions while these prompts are answered."""
    before = numbers(url)
    ask(url, prompts)
    after = numbers(url)
    score, count = (
        after[name] - before.get(name, 0)
        for name in ("fmoe_prediction_score_total", "fmoe_predictions_total")
    )
    return score / count


def is_merged(info: StoreInfo) -> bool:
    return len(info.readers) == 2 and all(v == info.version for v in info.readers.values())


def test_a_replica_predicts_what_only_the_other_has_seen(replicas: Replicas) -> None:
    prompts = [prompt.text for prompt in read_prompts(PROMPTS)][:8]
    alone = mean_score(replicas.left, prompts)
    store = RemoteMapStore.get(MODEL)
    num_learnt = 0.7 * numbers(replicas.left)["fmoe_generated_tokens_total"]
    within(LIMIT_S, lambda: store.info().header.size >= num_learnt and is_merged(store.info()))
    told = mean_score(replicas.right, prompts)
    print(f"mean similarity: {alone:.3f} for the first replica, {told:.3f} for the second")
    assert told > alone + 0.02
    assert told > 0.97


def test_clients_can_ask_the_store(replicas: Replicas) -> None:
    ask(replicas.left, ["What is a map?"])
    store = RemoteMapStore.get(MODEL)
    within(LIMIT_S, lambda: store.info().header.size > 0)
    (any_map,) = store.match(probs=[[1.0] * store.info().header.num_experts])
    (found,) = store.match(probs=any_map.probs)
    assert found.score == pytest.approx(1, abs=1e-3)


def test_a_killed_store_fails_no_request_and_is_back_with_its_maps(replicas: Replicas) -> None:
    store = RemoteMapStore.get(MODEL)
    ask(replicas.left, ["A first question, so that there is something to lose."])
    before = within(LIMIT_S, lambda: is_merged(store.info()) and store.info())
    store.save()
    assert len(MapStore.load(replicas.store_path)) >= before.header.size > 0
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(ask, url, [f"Question {n}" for n in range(6)])
            for url in (replicas.left, replicas.right)
        ]
        os.kill(before.pid, signal.SIGKILL)
        assert all(future.result(LIMIT_S) > 0 for future in asked)

    def is_back() -> bool:
        try:
            info = store.info()
        except StoreUnavailableError:
            return False
        return info.pid != before.pid and is_merged(info)

    within(LIMIT_S, is_back)
    after = store.info()
    assert after.version.life != before.version.life
    assert after.header.size >= before.header.size


class OtherModel(StubRunner):
    """A runner whose maps are of another model."""

    @property
    def learned_maps(self) -> Any:
        header = RemoteMapStore.get(MODEL).info().header
        return SimpleNamespace(header=dataclasses.replace(header, fingerprint="another"))


def test_a_shard_of_another_model_does_not_start(replicas: Replicas) -> None:
    async def start() -> None:
        async with sharing_maps(settings("tiny", replicas.store_path), OtherModel(), 0):
            raise AssertionError("it started")

    with pytest.raises(FingerprintError, match="maps of model"):
        asyncio.run(start())


def test_a_policy_without_maps_shares_nothing_and_refuses_a_file(cluster: str) -> None:
    async def start(settings: Settings) -> None:
        async with sharing_maps(settings, StubRunner(), 0):
            pass

    asyncio.run(start(Settings()))
    refused = parse_settings({"offload": {"policy": "lru", "store_path": "maps"}})
    with pytest.raises(ConfigError, match="policy lru learns no expert maps"):
        asyncio.run(start(refused))
    with pytest.raises(StoreUnavailableError, match="no map store of model 'tiny'"):
        RemoteMapStore.get("tiny")
