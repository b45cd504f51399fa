"""On two GPUs: two shards over NCCL give the bits of one."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fmoe_ray.config import Settings, parse_settings
from fmoe_ray.engine.messages import Sampling
from fmoe_ray.evaluate.drive import Drive
from fmoe_ray.evaluate.local_shards import LocalShards, shard_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SHOWN = Sampling(temperature=0.0, num_logprobs=5)
PROMPTS = [[5, 9, 17, 2, 40], [7, 7, 30], list(range(3, 63))]


def settings_of(folder: Path, num_shards: int) -> Settings:
    return parse_settings(
        {
            "model": {"path": str(folder), "device": "cuda", "dtype": "bfloat16"},
            "offload": {"policy": "lru", "budget": 0.5},
            "engine": {"max_batch_size": 4, "max_context": 400},
            "shards": {"num_shards": num_shards},
        }
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_two_shards_give_the_bits_of_one(family: str, checkpoint: Callable[[str], Path]) -> None:
    with shard_processes(2, gpus=True) as processes:
        answers: list[Any] = []
        for num_shards in (1, 2):
            settings = settings_of(checkpoint(family), num_shards)
            with closing(LocalShards(processes, settings)) as shards:
                drive = Drive(shards)
                drive(PROMPTS, 12, [SHOWN] * len(PROMPTS))
                rows = [row for request in drive.rows for row in request]
                answers.append([(row.token, row.logprob, row.top_logprobs) for row in rows])
    assert answers[0] == answers[1]
