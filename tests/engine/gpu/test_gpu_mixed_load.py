"""On a GPU, requests that join, end and are cancelled at any time leave nothing behind."""

import asyncio
import random
import time

import pytest
import torch

from fmoe_ray.config import Settings, parse_settings
from fmoe_ray.engine.engine import Engine
from fmoe_ray.engine.messages import Sampling
from fmoe_ray.engine.model_tokenizer import ModelTokenizer
from fmoe_ray.engine.request import GenerationRequest
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.engine.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SECONDS = 3.0
STUCK_S = 60.0
LEAK_BYTES = 96 << 20
"""cuBLAS keeps a workspace for each stream that it was used on."""
LOADS = [("fmoe+", 0.5), ("fmoe+", 0.25), ("fmoe", 0.5), ("lru", 2)]


def settings_of(policy: str, budget: float | int, device: str = "cuda") -> Settings:
    return parse_settings(
        {
            "model": {"path": "tiny", "device": device, "dtype": "bfloat16"},
            "offload": {"policy": policy, "budget": budget, "transfer_timeout_s": 20},
            "engine": {"max_batch_size": 8, "max_context": 400, "max_prefill_tokens": 256},
        }
    )


async def one_client(engine: Engine, dice: random.Random, until: float) -> int:
    """Asks again and again; every third answer is left in its middle. Answers heard to the end."""
    finished = 0
    while time.monotonic() < until:
        request = GenerationRequest(
            prompt=[dice.randrange(5, 4000) for _ in range(dice.choice([1, 3, 40, 300]))],
            max_tokens=dice.randrange(1, 60),
            sampling=Sampling(temperature=dice.choice([0.0, 1.0]), seed=dice.randrange(1000)),
            ignore_eos=True,
        )
        leaves_after = dice.randrange(1, 20) if dice.random() < 1 / 3 else None
        heard = 0
        with engine.submit(request) as stream:
            async for event in stream:
                heard += len(event.token_ids)
                if event.finish_reason is not None:
                    assert event.finish_reason == "length"
                    assert heard == request.max_tokens
                    finished += 1
                elif leaves_after is not None and heard >= leaves_after:
                    break
        if dice.random() < 0.2:
            await asyncio.sleep(dice.random() / 10)
    return finished


async def mixed_load(settings: Settings, seconds: float, seed: int) -> int:
    """Answers heard to the end. Fails where a step hangs or the books do not close."""
    runner = StepRunner.load(settings)
    tokenizer: Tokenizer = ModelTokenizer.load("tiny")
    async with asyncio.timeout(seconds + STUCK_S):
        async with Engine(runner, tokenizer, settings.engine) as engine:
            until = time.monotonic() + seconds
            clients = [one_client(engine, random.Random(seed * 100 + i), until) for i in range(12)]
            finished = sum(await asyncio.gather(*clients))
            while (health := engine.health()).num_running + health.num_waiting:
                await asyncio.sleep(0.01)  # what was cancelled leaves within a step
            engine.check_integrity()
            runner.check_integrity()
            assert health.num_free_slots == runner.info.num_slots
    return finished


@pytest.mark.parametrize(("policy", "budget"), LOADS)
def test_joins_and_cancels_leave_no_request_and_no_slot(policy: str, budget: float | int) -> None:
    assert asyncio.run(mixed_load(settings_of(policy, budget), SECONDS, seed=0)) > 0


def test_a_closed_engine_leaves_no_device_memory() -> None:
    free = []
    for _ in range(3):  # the first also loads libraries and kernels
        asyncio.run(mixed_load(settings_of("fmoe+", 0.5), SECONDS, seed=0))
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[2] < LEAK_BYTES, free
