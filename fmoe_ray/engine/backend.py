"""Where tokenizer and step runner come from: the model's, or a stub's in tests and benchmarks."""

from collections.abc import Callable
from typing import Protocol

from fmoe_ray.config import Settings
from fmoe_ray.engine.runner import LocalRunner
from fmoe_ray.engine.seat import ONLY_SEAT, Seat
from fmoe_ray.engine.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Gets experts loaded and experts in all."""


class Backend(Protocol):
    """Picklable: replica and shards are given the same one."""

    def check(self, settings: Settings) -> None:
        """Raises ModelError or CapacityError, quickly, if this machine cannot serve the model."""
        ...

    def load_tokenizer(self, settings: Settings) -> Tokenizer:
        """Blocks; raises ModelError."""
        ...

    def load_runner(
        self, settings: Settings, progress: Progress | None = None, seat: Seat = ONLY_SEAT
    ) -> LocalRunner:
        """Blocks while the shards meet and the model loads.

        Raises ModelError, ConfigError, CapacityError; EngineError if the shards do not meet.
        """
        ...


class ModelBackend:
    """The model that `settings` names. Imports torch and transformers when asked for it."""

    def check(self, settings: Settings) -> None:
        from fmoe_ray.models.preflight import check_machine

        check_machine(settings)

    def load_tokenizer(self, settings: Settings) -> Tokenizer:
        from fmoe_ray.engine.model_tokenizer import ModelTokenizer

        return ModelTokenizer.load(settings.model.path)

    def load_runner(
        self, settings: Settings, progress: Progress | None = None, seat: Seat = ONLY_SEAT
    ) -> LocalRunner:
        from fmoe_ray.engine.step_runner import StepRunner

        return StepRunner.load(settings, progress, seat)
