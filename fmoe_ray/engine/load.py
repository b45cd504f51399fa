"""What an engine says of its load to whoever decides on the number of replicas."""

from fmoe_ray.engine.engine import Engine
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.request import Usage

TOKENS_IN_FLIGHT = "fmoe_tokens_in_flight"
STALL_SHARE = "fmoe_stall_share"


class LoadMeter:
    """An EngineObserver that adds up the time of steps, and how much of it was stall."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._stall_s = 0.0

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        self._seconds += result.stats.seconds
        self._stall_s += result.stats.stall_seconds

    def request_ended(self, reason: str, usage: Usage) -> None:
        """Load is about what has not ended."""

    def take(self, engine: Engine) -> dict[str, float]:
        """Tokens now, and the share of stall since the last call."""
        stall_share = self._stall_s / self._seconds if self._seconds > 0 else 0.0
        self._seconds = self._stall_s = 0.0
        return {
            TOKENS_IN_FLIGHT: float(engine.health().num_tokens),
            STALL_SHARE: min(1.0, stall_share),
        }
