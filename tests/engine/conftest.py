"""Small checkpoints, and step runners over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fmoe_ray.config import parse_settings
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.evaluate.tiny_models import save_tiny

Load = Callable[..., StepRunner]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture
def load(checkpoint: Callable[[str], Path]) -> Iterator[Load]:
    """load(family, offload={...}, engine={...}) -> StepRunner, closed after the test."""
    runners: list[StepRunner] = []

    def make(
        family: str = "mixtral",
        offload: dict[str, object] | None = None,
        engine: dict[str, object] | None = None,
    ) -> StepRunner:
        settings = {
            "model": {"path": str(checkpoint(family)), "device": "cpu"},
            "offload": {"policy": "lru", **(offload or {})},
            "engine": {"max_batch_size": 4, "max_context": 200, **(engine or {})},
        }
        runner = StepRunner.load(parse_settings(settings))
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.check_integrity()
        runner.shutdown()
