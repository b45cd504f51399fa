"""Several shards in processes of their own, over gloo: the same bits as one."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fmoe_ray.config import Settings, parse_settings
from fmoe_ray.engine.messages import Row, Sampling, StepPlan, StepResult
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import ConfigError, EngineError, ShardLostError
from fmoe_ray.evaluate.drive import GREEDY, Drive, Driven
from fmoe_ray.evaluate.local_shards import LocalShards, ShardProcess, shard_processes
from fmoe_ray.evaluate.tiny_models import EXPERTS, TOP_K, VOCAB
from fmoe_ray.models.architecture import build_architecture
from fmoe_ray.models.checkpoint import open_checkpoint
from fmoe_ray.models.loader import store_fingerprint

PROMPTS = [[(7 * n + i) % (VOCAB - 3) + 3 for i in range(n)] for n in (3, 40, 17, 1)]
NUM_TOKENS = 6
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ShardProcess]]:
    with shard_processes(3) as processes:
        yield processes


def settings_of(folder: Path, num_shards: int, **offload: Any) -> Settings:
    return parse_settings(
        {
            "model": {"path": str(folder), "device": "cpu"},
            "offload": {"policy": "lru", "budget": 0.5, **offload},
            "engine": {"max_batch_size": 4, "max_context": 100, "num_threads": 1},
            "shards": {"num_shards": num_shards, "meeting_timeout_s": 30},
        }
    )


def store_of(folder: Path) -> Path:
    fingerprint = store_fingerprint(open_checkpoint(folder), build_architecture(folder, None))
    return Path("/dev/shm") / f"fmoe-{fingerprint}"


def everything(runner: Driven, sampling: Sampling) -> tuple[list[Any], Drive]:
    """What each row got; a log-probability is a function of the whole row of logits."""
    drive = Drive(runner)
    drive(PROMPTS, NUM_TOKENS, [sampling] * len(PROMPTS))
    rows = [row for request in drive.rows for row in request]
    return [(row.token, row.logprob, row.top_logprobs) for row in rows], drive


def everything_alone(folder: Path, sampling: Sampling) -> tuple[list[Any], list[StepResult]]:
    runner = StepRunner.load(settings_of(folder, 1))
    try:
        rows, drive = everything(runner, sampling)
    finally:
        runner.shutdown()
    return rows, drive.results


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "phimoe"])
def test_tokens_and_logits_are_the_same_bits_for_every_number_of_shards(
    family: str, num_shards: int, checkpoint: Checkpoint, processes: list[ShardProcess]
) -> None:
    """Sampled and with all logprobs; some of a layer's experts never divide by three."""
    sampling = Sampling(temperature=0.8, seed=5, num_logprobs=VOCAB)
    expected, results_alone = everything_alone(checkpoint(family), sampling)
    with closing(LocalShards(processes, settings_of(checkpoint(family), num_shards))) as shards:
        seen, drive = everything(shards, sampling)
        num_layers = shards.info.num_layers
        assert seen == expected
        for one, many in zip(results_alone, drive.results, strict=True):
            assert many.routing_checksum == one.routing_checksum != 0
        for request in drive.rows:
            for row in request[-NUM_TOKENS + 1 :]:
                counts = row.experts
                assert counts.hits + counts.late + counts.misses == num_layers * TOP_K
        slots = [info.expert_slots for info in shards.infos]
        own = [len(range(rank, num_layers * EXPERTS, num_shards)) for rank in range(num_shards)]
        assert slots == [count // 2 for count in own]


def test_the_smallest_budget_of_a_shard_is_top_k_experts(
    checkpoint: Checkpoint, processes: list[ShardProcess]
) -> None:
    expected, _ = everything_alone(checkpoint("mixtral"), GREEDY)
    settings = settings_of(checkpoint("mixtral"), 2, budget=TOP_K)
    with closing(LocalShards(processes, settings)) as shards:
        assert everything(shards, GREEDY)[0] == expected
    with pytest.raises(ConfigError, match=f"a token needs {TOP_K} at once"):
        LocalShards(processes, settings_of(checkpoint("mixtral"), 2, budget=TOP_K - 1))
    assert not store_of(checkpoint("mixtral")).exists()


def test_the_shards_of_a_node_share_one_host_store(
    checkpoint: Checkpoint, processes: list[ShardProcess]
) -> None:
    folder = checkpoint("mixtral")
    store = store_of(folder)
    with closing(LocalShards(processes, settings_of(folder, 3))):
        assert store.exists()
    assert not store.exists()


def test_shards_on_unlike_devices_are_refused(
    checkpoint: Checkpoint, processes: list[ShardProcess]
) -> None:
    """More threads may cut a product into other sums: as unlike as another processor."""
    settings = settings_of(checkpoint("mixtral"), 2)
    other = settings.engine.model_copy(update={"num_threads": 2})

    class Unlike(ShardProcess):
        """Shard 1, told other settings than shard 0."""

        def __init__(self, process: ShardProcess) -> None:
            self.__dict__ = process.__dict__

        def tell(self, name: str, *arguments: Any) -> None:
            changed = settings.model_copy(update={"engine": other})
            super().tell(name, changed, arguments[1])

    with pytest.raises(ConfigError, match=r"shard 0 has .*1 threads.*shard 1 has .*2 threads"):
        LocalShards([processes[0], Unlike(processes[1])], settings)


def test_a_killed_shard_ends_the_step_of_the_others(checkpoint: Checkpoint) -> None:
    """At once, and so does every later step."""
    with shard_processes(2) as processes:
        shards = LocalShards(processes, settings_of(checkpoint("mixtral"), 2))
        row = Row(request_id=0, slot=0, start=0, tokens=[4, 5], samples=True, sampling=GREEDY)
        assert shards.run(StepPlan(step=0, rows=[row])).error is None
        pid = processes[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        processes[1].process.join(10)
        began = time.monotonic()
        processes[0].tell("run", StepPlan(step=1, rows=[row]))
        with pytest.raises(EngineError, match="shard 0 of 2 lost the others"):
            processes[0].answer()
        assert time.monotonic() - began < 5
        with pytest.raises(ShardLostError, match="is gone"):
            shards.run(StepPlan(step=2, rows=[row]))


def test_shards_that_do_not_meet_say_where_they_waited(
    checkpoint: Checkpoint, processes: list[ShardProcess]
) -> None:
    settings = settings_of(checkpoint("mixtral"), 2)
    short = settings.shards.model_copy(update={"meeting_timeout_s": 1.0})

    class Absent(ShardProcess):
        def __init__(self) -> None:
            """No process."""

        def tell(self, name: str, *arguments: Any) -> None:
            """Does not come."""

        def answer(self) -> None:
            return None

    with pytest.raises(EngineError, match=r"did not meet all 2 shards at 127.0.0.1:\d+ within 1 s"):
        LocalShards([processes[0], Absent()], settings.model_copy(update={"shards": short}))
