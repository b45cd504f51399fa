"""The exported numbers are the engine's own."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fmoe_ray.api.metrics import PrometheusObserver
from fmoe_ray.cache import CacheCounters
from fmoe_ray.config import parse_settings
from fmoe_ray.engine.engine import Engine
from fmoe_ray.engine.messages import Sampling
from fmoe_ray.engine.request import GenerationRequest
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.engine.stub_runner import StubTokenizer

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [20] * 30]


def numbers(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.parametrize("policy", ["lru", "fmoe"])
def test_metrics_equal_the_counters_of_the_offloader(
    policy: str, checkpoint: Callable[[str], Path]
) -> None:
    settings = parse_settings(
        {
            "model": {"path": str(checkpoint("mixtral")), "device": "cpu"},
            "offload": {"policy": policy, "budget": 0.3},
            "engine": {"max_batch_size": 2},
        }
    )
    runner = StepRunner.load(settings)
    observer = PrometheusObserver()

    async def serve() -> tuple[CacheCounters, str]:
        engine = Engine(runner, StubTokenizer(), settings.engine, observers=(observer,))
        await engine.start()
        requests = [
            GenerationRequest(prompt=prompt, max_tokens=12, sampling=Sampling(temperature=0))
            for prompt in PROMPTS
        ]
        with engine.submit(*requests) as events:
            async for event in events:
                assert event.error is None
        counters = runner.counters()
        text = observer.render(engine.health(), engine.info)
        await engine.close()
        return counters, text

    own, text = asyncio.run(serve())
    found = numbers(text)
    assert found["fmoe_steps_total"] == own.iterations >= 24
    assert found['fmoe_experts_total{result="hit"}'] == own.hits > 0
    assert found['fmoe_experts_total{result="late"}'] == own.late
    assert found['fmoe_experts_total{result="miss"}'] == own.misses > 0
    assert found['fmoe_bytes_total{cause="on_demand"}'] == own.bytes.on_demand > 0
    assert found["fmoe_stall_seconds_total"] == pytest.approx(own.stall_s, rel=1e-6)
    # A prefetch may end, and a prediction come, after the last step: it would count in the next.
    unseen = own.prefetch_loads and runner.info.expert_bytes * runner.info.expert_slots
    for cause, value in (
        ('fmoe_bytes_total{cause="prefetch_used"}', own.bytes.prefetch_used),
        ('fmoe_bytes_total{cause="prefetch_wasted"}', own.bytes.prefetch_wasted),
        ("fmoe_bytes_prefetched_total", own.bytes.prefetched),
    ):
        assert value - unseen <= found[cause] <= value
    assert found["fmoe_predictions_total"] <= own.num_predictions
    assert found["fmoe_expert_slots"] == runner.info.expert_slots
    assert found["fmoe_kv_slots"] == 2
    assert found["fmoe_ttft_seconds_count"] == len(PROMPTS) == found["fmoe_queue_seconds_count"]
    assert found["fmoe_batch_size_count"] == own.iterations
    if policy == "fmoe":
        assert 0 < found["fmoe_prediction_score_total"] <= found["fmoe_predictions_total"]
        assert found["fmoe_bytes_prefetched_total"] > 0
        assert 0 < found["fmoe_store_maps"] <= own.iterations * 2
    else:
        assert found["fmoe_predictions_total"] == found["fmoe_store_maps"] == 0
