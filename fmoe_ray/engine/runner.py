"""The seam between scheduler and computation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fmoe_ray.engine.messages import StepPlan, StepResult

if TYPE_CHECKING:
    from fmoe_ray.engine.learned_maps import LearnedMaps


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerInfo:
    """What the scheduler must know of the model behind a runner."""

    num_slots: int
    """KV slots: requests that can be in flight at once."""
    max_context: int
    """Tokens a slot holds."""
    max_prefill_tokens: int
    vocab_size: int
    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int
    expert_slots: int
    device: str
    dtype: str
    policy: str


class Runner(Protocol):
    """Carries out steps, one at a time.

    In one process it is `engine.step_runner.StepRunner` on a thread; in a cluster a channel to the
    shards.
    """

    @property
    def info(self) -> RunnerInfo: ...

    async def step(self, plan: StepPlan) -> StepResult:
        """Raises EngineError when no later step can succeed either."""

    async def close(self) -> None: ...


class LocalRunner(Runner, Protocol):
    """A runner that computes in this process."""

    @property
    def learned_maps(self) -> "LearnedMaps | None":
        """What its policy learns; None where it keeps no expert maps."""
