"""How many replicas a Serve application should have, from what its engines say of themselves.

In a Serve file, below `autoscaling_config`:

    policy:
      policy_function: fmoe_ray.actors.autoscaling:TokenLoadPolicy
      policy_kwargs: {target_tokens: 16384, tolerated_stall: 0.5}

Serve keeps min_replicas, max_replicas, delays and factors around it, and imports it in its
controller and in the dashboard: the package has to be installed on the head node.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fmoe_ray.engine.load import STALL_SHARE, TOKENS_IN_FLIGHT
from fmoe_ray.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    tokens_in_flight: float
    stall_share: float
    """Part of the steps' time in which they waited for experts, 0 to 1."""


class TokenLoadPolicy:
    """As many replicas as share the tokens in flight at `target_tokens` each.

    Requests differ a thousandfold in tokens, so their number says little about load. A replica that
    waits for experts computes less: its target shrinks by what its stall exceeds `tolerated_stall`,
    which offloading has even with a few tokens in flight. Another replica brings another cache and
    another host link.
    """

    def __init__(self, *, target_tokens: int, tolerated_stall: float = 0.5) -> None:
        if target_tokens < 1:
            raise ConfigError(f"target_tokens {target_tokens}: give at least 1")
        if not 0 <= tolerated_stall <= 1:
            raise ConfigError(f"tolerated_stall {tolerated_stall}: give a share from 0 to 1")
        self._target_tokens = target_tokens
        self._tolerated_stall = tolerated_stall

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Called by Serve with an AutoscalingContext.

        Requests of which no replica has told anything within `look_back_period_s` are no reason to
        change: the number wanted before stands.
        """
        metrics = context.aggregated_metrics or {}
        tokens, stalls = (metrics.get(name, {}) for name in (TOKENS_IN_FLIGHT, STALL_SHARE))
        loads = [
            ReplicaLoad(tokens_in_flight=tokens[replica], stall_share=stalls[replica])
            for replica in tokens
            if replica in stalls
        ]
        queued = context.total_queued_requests or 0.0
        running = max(0.0, context.total_num_requests - queued)
        if running > 0 and not loads:
            return context.target_num_replicas, {}
        return self.wanted_replicas(loads, num_running=running, num_queued=queued), {}

    def wanted_replicas(
        self, loads: Iterable[ReplicaLoad], *, num_running: float, num_queued: float
    ) -> int:
        """Pure. `num_queued` requests are on their way to a replica: they count as those that run
        do. At least one replica while there is any request; zero otherwise.
        """
        loads = list(loads)
        known = sum(load.tokens_in_flight for load in loads)
        tokens = known * (1 + num_queued / num_running) if num_running > 0 else known
        stalled = sum(load.tokens_in_flight * load.stall_share for load in loads)
        stall_share = stalled / known if known > 0 else 0.0
        capacity = self._target_tokens * (1 - max(0.0, stall_share - self._tolerated_stall))
        wanted = math.ceil(tokens / max(capacity, 1.0))
        return max(wanted, 1) if num_running + num_queued > 0 else wanted
