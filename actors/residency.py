"""What a replica tells its routers: the experts that it holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.request import Usage


class ResidencyObserver:
    """An EngineObserver that keeps the newest list of resident experts."""

    def __init__(self) -> None:
        self._resident = b""

    def step_done(self, plan: StepPlan, result: StepResult, num_waiting: int) -> None:
        self._resident = result.stats.resident or self._resident

    def request_ended(self, reason: str, usage: Usage) -> None:
        """Of no interest here."""

    def stats(self) -> dict[str, Any]:
        return {"resident": self._resident}


def fit(probs_LJ: NDArray[np.float32], stats: dict[str, Any]) -> float:
    """Between 0 and 1: the share of a predicted map [L, J] that the resident experts cover.

    0 for a replica that has told nothing yet.
    """
    packed = np.frombuffer(stats.get("resident", b""), np.uint8)
    if len(packed) * 8 < probs_LJ.size:
        return 0.0
    resident = np.unpackbits(packed, count=probs_LJ.size).reshape(probs_LJ.shape)
    return float((probs_LJ * resident).sum() / max(probs_LJ.sum(), 1e-9))
