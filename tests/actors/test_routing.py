"""Routing by experts on two replicas of one application: measured, with and without."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import fmoe_ray
from fmoe_ray.actors.map_link import RemoteMapStore
from fmoe_ray.config import parse_settings
from fmoe_ray.errors import StoreUnavailableError
from fmoe_ray.trace.prompts import read_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow]

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


def test_routing_by_experts_is_measured(cluster: str) -> None:
    with_ = measure(cluster, True)
    without = measure(cluster, False)
    print(f"hit rate over HTTP: {with_:.3f} by experts, {without:.3f} by power of two")
    assert with_ > without - 0.05
