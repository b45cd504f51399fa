"""The Serve deployment: HTTP, tokenizer and scheduler of one replica. It touches no GPU."""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.util.placement_group import get_current_placement_group

from fmoe_ray.actors.cluster import check_node
from fmoe_ray.actors.gang import ShardGang
from fmoe_ray.actors.handle_calls import HandleCalls
from fmoe_ray.actors.metrics import RayObserver
from fmoe_ray.actors.residency import ResidencyObserver
from fmoe_ray.api.app import create_app
from fmoe_ray.api.metrics import PrometheusObserver
from fmoe_ray.api.service import Service
from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Backend
from fmoe_ray.engine.engine import Engine
from fmoe_ray.engine.load import LoadMeter

logger = logging.getLogger(__name__)

LEAVE_AFTER_S = 0.5
"""Between the end of the engine and the end of the process: answers in flight get out."""


class Replica(HandleCalls):
    """One hop from client to engine: the replica is the ASGI application itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, backend: Backend
    ) -> None:
        # Ray leaves all GPUs visible to an actor that asked for none; a stray call would put a
        # CUDA context on the shards' device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        group = get_current_placement_group()
        assert group is not None, "the deployment has no placement group"
        await check_node(settings, backend, group)
        self._settings = settings
        tag = serve.get_replica_context().replica_tag
        self._gang = ShardGang(with_own_trace(settings, tag), backend, group)
        channel, tokenizer = await asyncio.gather(
            self._gang.start(), asyncio.to_thread(backend.load_tokenizer, settings)
        )
        self._channel = channel
        metrics = PrometheusObserver()
        self._load = LoadMeter()
        self._residency = ResidencyObserver()
        self._engine = Engine(
            channel,
            tokenizer,
            settings.engine,
            observers=(
                metrics,
                RayObserver(settings.model.name, channel.info),
                self._load,
                self._residency,
            ),
        )
        self._service = Service(
            engine=self._engine,
            model_name=settings.model.name,
            replica=tag,
            settings=settings.server,
            metrics=metrics,
            started_at=int(time.time()),
        )
        await self._engine.start()
        self._tasks = (
            asyncio.create_task(self._stop_engine_without_shards()),
            asyncio.create_task(self._leave_without_engine()),
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)

    def check_health(self) -> None:
        """Called by Serve. Cheap, and about progress: a busy engine is healthy, a stuck one not."""
        self._engine.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve; `actors.autoscaling.TokenLoadPolicy` reads it."""
        return self._load.take(self._engine)

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve, for `actors.router`."""
        return self._residency.stats()

    def environment(self) -> dict[str, str]:
        """What this process sees of the machine."""
        return {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}

    async def shard_pids(self) -> list[int]:
        return await self._gang.pids()

    async def _stop_engine_without_shards(self) -> None:
        error = await self._gang.lost()
        self._channel.fail(error)
        self._engine.fail(error)

    async def _leave_without_engine(self) -> None:
        """Serve replaces a dead process at once, but an unhealthy one only after three checks."""
        error = await self._engine.failed()
        logger.error("this replica leaves: %s", error)
        await asyncio.sleep(LEAVE_AFTER_S)
        os._exit(1)

    async def __del__(self) -> None:
        if not hasattr(self, "_tasks"):
            return  # __init__ has failed: there is nothing to finish
        for task in self._tasks:
            task.cancel()
        await self._engine.close()
        await self._gang.ended(self._settings.server.save_timeout_s)


def with_own_trace(settings: Settings, replica: str) -> Settings:
    """Replicas that record do not overwrite each other, nor what one before them has recorded."""
    if settings.offload.record_path is None:
        return settings
    path = Path(settings.offload.record_path)
    own = str(path.with_name(f"{path.stem}.{replica}{path.suffix}"))
    offload = settings.offload.model_copy(update={"record_path": own})
    return settings.model_copy(update={"offload": offload})


ReplicaDeployment: Any = serve.deployment(name="Replica")(serve.ingress()(Replica))
