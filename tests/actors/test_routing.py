"""Routing by experts over a real map store: what the router predicts and chooses, and two replicas
of one application with and without it.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest

import fmoe_ray
from fmoe_ray.actors.map_link import RemoteMapStore
from fmoe_ray.actors.prompt_maps import PromptMaps
from fmoe_ray.actors.residency import fit
from fmoe_ray.actors.router import ExpertAffinityRouter
from fmoe_ray.config import parse_settings
from fmoe_ray.engine.model_tokenizer import ModelTokenizer
from fmoe_ray.errors import StoreUnavailableError
from fmoe_ray.maps.named import NamedStore
from fmoe_ray.maps.store import MapStore
from fmoe_ray.trace.prompts import read_prompts

pytestmark = pytest.mark.ray

PROMPTS = Path(fmoe_ray.__file__).parent / "assets/prompts/prompts.jsonl"
NUM_TOPICS = 2
ROUNDS = 30
LIMIT_S = 60.0


def within(seconds: float, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.1)
    return value


def has_maps(model: str) -> bool:
    try:
        return RemoteMapStore.get(model).info().header.size > 0
    except StoreUnavailableError:
        return False


def measure(cluster: str, by_experts: bool) -> float:
    """The hit rate of requests of a few topics."""
    from ray import serve

    from fmoe_ray.actors.replica import ReplicaDeployment
    from fmoe_ray.actors.resources import placement_options
    from fmoe_ray.actors.router import router_options
    from fmoe_ray.engine.backend import ModelBackend

    model = f"routed-{by_experts}"
    settings = parse_settings(
        {
            "model": {"path": "tiny", "served_name": model, "device": "cpu"},
            "offload": {"policy": "fmoe", "budget": 0.25},
            "engine": {"max_batch_size": 4, "num_threads": 1},
            "routing": {"by_experts": by_experts},
        }
    )
    options = {**placement_options(settings), **router_options(settings), "num_replicas": 2}
    application = ReplicaDeployment.options(**options).bind(settings, ModelBackend())
    serve.run(application, name="routed", route_prefix="/routed")
    try:
        return asyncio.run(ask(f"{cluster}/routed", model))
    finally:
        serve.delete("routed")
        RemoteMapStore.get(model).stop()


async def ask(url: str, model: str) -> float:
    topics = [prompt.text for prompt in read_prompts(PROMPTS)][:NUM_TOPICS]
    choose = random.Random(3)
    hits = total = 0
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(prompt: str) -> dict[str, Any]:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 24,
                "temperature": 0,
            }
            response = await client.post(
                "/v1/chat/completions", json=body, headers={"x-fmoe-prompt": quote(prompt)}
            )
            usage: dict[str, Any] = response.json()["usage"]["fmoe"]
            return usage

        for prompt in topics * 3:
            await one(prompt)
        await asyncio.to_thread(within, LIMIT_S, lambda: has_maps(model))
        await asyncio.sleep(5)  # the router reads maps every 2 s, and residency every second
        for _ in range(ROUNDS):
            usage = await one(choose.choice(topics))
            hits += usage["hits"]
            total += usage["hits"] + usage["late"] + usage["misses"]
    return float(hits / total)


@pytest.mark.slow
def test_requests_are_answered_with_and_without_routing_by_experts(cluster: str) -> None:
    """What it gains is printed, not asserted: one request at a time, and experts of the model in
    the package hardly differ between prompts.
    """
    with_ = measure(cluster, True)
    without = measure(cluster, False)
    print(f"hit rate over HTTP: {with_:.3f} by experts, {without:.3f} by power of two")
    assert with_ > 0 and without > 0


L, J = 3, 8
QUESTIONS = ["a hotel in Zürich", "seventeen trombones"]


@pytest.fixture
def taught_store(cluster: str) -> Iterator[str]:
    """The name of a model whose store knows which experts the tokens of `QUESTIONS` need: those of
    the first the lower half, those of the second the upper.
    """
    from fmoe_ray.engine.map_exchange import Version

    tokenizer = ModelTokenizer.load("tiny")
    first, second = (set(tokenizer.encode(text)) for text in QUESTIONS)
    named = NamedStore(MapStore(num_layers=L, num_experts=J, top_k=2, capacity=64))
    for tokens, half in ((first - second, slice(0, J // 2)), (second - first, slice(J // 2, J))):
        assert tokens
        probs_J = np.full(J, 0.01, np.float32)
        probs_J[half] = 0.24
        named.store.insert(
            np.tile(probs_J, (len(tokens), L, 1)), token_ids=np.array(sorted(tokens), np.int32)
        )
    named.refresh()
    store = RemoteMapStore.get_or_create("taught", named.store.header, None)
    store.sync("teacher", named.read(sorted(named.names)), Version())
    yield "taught"
    store.stop()


def resident(half: slice) -> dict[str, bytes]:
    experts_LJ = np.zeros((L, J), np.bool_)
    experts_LJ[:, half] = True
    return {"resident": np.packbits(experts_LJ).tobytes()}


def test_prompts_are_predicted_from_the_maps_of_the_store(taught_store: str) -> None:
    prompts = PromptMaps("tiny", taught_store)
    prompts.start()
    for question, half in zip(QUESTIONS, (slice(0, J // 2), slice(J // 2, J)), strict=True):
        (probs_LJ,) = within(LIMIT_S, partial(predicted, prompts, question))
        assert probs_LJ.shape == (L, J)
        assert fit(probs_LJ, resident(half)) > 0.6
    assert prompts.predict({"prompt": ""}) is None


def predicted(prompts: PromptMaps, text: str) -> Any:
    return None if (probs_LJ := prompts.predict({"prompt": text})) is None else [probs_LJ]


def test_the_replica_that_holds_a_prompts_experts_is_asked_first(taught_store: str) -> None:
    replicas: list[Any] = [
        SimpleNamespace(replica_id="lower", routing_stats=resident(slice(0, J // 2))),
        SimpleNamespace(replica_id="upper", routing_stats=resident(slice(J // 2, J))),
    ]

    async def run() -> None:
        router = ExpertAffinityRouter(DeploymentID(name="replica"), DeploymentHandleSource.PROXY)
        router.initialize_state(max_lead=2, model_path="tiny", model_name=taught_store)

        async def ranks(text: str) -> list[list[str]]:
            request = PendingRequest([{"prompt": text}], {}, RequestMetadata("1", "1"))
            groups = await router.choose_replicas(replicas, request)
            assert {replica.replica_id for replica in groups[-1]} == {"lower", "upper"}
            return [[replica.replica_id for replica in group] for group in groups]

        async with asyncio.timeout(LIMIT_S):
            while len(await ranks(QUESTIONS[0])) == 1:  # until it has read the store
                await asyncio.sleep(0.1)
        for _ in range(5):
            assert (await ranks(QUESTIONS[0]))[0] == ["lower"]
            assert (await ranks(QUESTIONS[1]))[0] == ["upper"]
        router.replica_queue_len_cache.update("lower", 3)
        router.replica_queue_len_cache.update("upper", 0)
        assert len(await ranks(QUESTIONS[0])) == 1  # too busy, and nobody else fits
        assert len(await ranks("")) == 1

    asyncio.run(run())
