"""Base classes for a policy or predictor written in Python, for experiments.

The core takes the GIL for every call: right for the simulator and for tests, slow in the engine.
Events, predictions and the cache are lent for the call; copy what must outlive it. A policy
returns instructions, a predictor predictions; an exception ends the run that made the call.
"""

import numpy as np
from numpy.typing import NDArray

from fmoe_ray import _native
from fmoe_ray._native import (
    ExpertCache,
    GateRequested,
    Geometry,
    Instruction,
    IterationContext,
    IterationStarted,
    PolicyParts,
    Prediction,
    VictimNeeded,
)

__all__ = ["Policy", "Predictor", "plugin_policy"]


class Policy:
    """The decisions: events in, instructions out. Only `victim` must be written."""

    def iteration_started(self, event: IterationStarted, cache: ExpertCache) -> list[Instruction]:
        return []

    def gate_requested(self, event: GateRequested, cache: ExpertCache) -> list[Instruction]:
        """Called before the misses among `event.needed` are served."""
        return []

    def predicted(self, prediction: Prediction, cache: ExpertCache) -> list[Instruction]:
        return []

    def copy_done(self, expert: int, cache: ExpertCache) -> list[Instruction]:
        return []

    def iteration_ended(self, cache: ExpertCache) -> list[Instruction]:
        return []

    def request_ended(self, request: int, cache: ExpertCache) -> list[Instruction]:
        return []

    def link_free(self, cache: ExpertCache) -> list[Instruction]:
        """The link can take one more prefetch: at most one `Instruction.start_copy`."""
        return []

    def victim(self, needed: VictimNeeded, cache: ExpertCache) -> int:
        """An expert with `cache.can_evict`, or -1 where there is none."""
        raise NotImplementedError


class Predictor:
    """Looks at what inference publishes. Arrays are copies: R rows, J experts."""

    def iteration_started(self, context: IterationContext) -> list[Prediction]:
        return []

    def gate_observed(
        self,
        layer: int,
        probs: NDArray[np.float32],
        chosen: NDArray[np.uint8] | None,
        speculative: NDArray[np.float32] | None,
    ) -> list[Prediction]:
        """probs, chosen, speculative [R, J]; the last is gate layer + 1 on this layer's state."""
        return []

    def iteration_ended(self) -> list[Prediction]:
        return []

    def request_ended(self, request: int) -> None:
        pass

    def is_synchronous(self) -> bool:
        """True: inference waits for the prediction."""
        return False


def plugin_policy(
    geometry: Geometry, policy: Policy, predictor: Predictor | None = None
) -> PolicyParts:
    """Parts for whatever takes those of `make_policy`: a planner or a simulator."""
    return _native.plugin_policy(geometry, policy, predictor)
