"""Routes a request to the replica whose resident experts fit what its prompt will need."""

import asyncio
import random
import weakref
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from fmoe_ray.actors.prompt_maps import PromptMaps
from fmoe_ray.actors.residency import fit
from fmoe_ray.config import Settings

MIN_ADVANTAGE = 0.01
"""A replica that fits hardly better is not worth a longer queue."""
_STATS_EVERY_S = 1.0


class ExpertAffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Power of two choices, but for the replica that fits clearly best and is not too busy."""

    def initialize_state(self, **settings: Any) -> None:
        self._max_lead = int(settings["max_lead"])
        self._prompts = PromptMaps(settings["model_path"], settings["model_name"])
        self._prompts.start()
        weakref.finalize(self, self._prompts.close)  # Serve drops routers without a word

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks: the second group is asked where nobody of the first accepts."""
        if not candidate_replicas:
            return []
        some = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        fitting = await self._fitting(candidate_replicas, pending_request)
        return [some] if fitting is None else [[fitting], some]

    async def _fitting(
        self, replicas: list[RunningReplica], request: PendingRequest | None
    ) -> RunningReplica | None:
        if len(replicas) < 2 or request is None or not request.args:
            return None
        # Tokenizing a long prompt would hold up every other request.
        probs_LJ = await asyncio.to_thread(self._prompts.predict, request.args[0])
        if probs_LJ is None:
            return None
        fits = [fit(probs_LJ, replica.routing_stats) for replica in replicas]
        queues = [self.replica_queue_len_cache.get(r.replica_id) or 0 for r in replicas]
        return choose(replicas, fits, queues, self._max_lead)


def choose(replicas: list[Any], fits: list[float], queues: list[int], max_lead: int) -> Any | None:
    """The best fitting of those not too busy; None where it is not clearly better than the next."""
    free = [i for i in range(len(replicas)) if queues[i] <= min(queues) + max_lead]
    ranked = sorted(free, key=lambda i: -fits[i])
    if len(ranked) < 2 or fits[ranked[0]] - fits[ranked[1]] < MIN_ADVANTAGE:
        return None
    return replicas[ranked[0]]


def router_options(settings: Settings) -> dict[str, Any]:
    """Options of the deployment."""
    if not settings.routing.by_experts:
        return {}
    return {
        "request_router_config": RequestRouterConfig(
            request_router_class=ExpertAffinityRouter,
            request_router_kwargs={
                "max_lead": settings.routing.max_lead,
                "model_path": settings.model.path,
                "model_name": settings.model.name,
            },
            request_routing_stats_period_s=_STATS_EVERY_S,
        )
    }
