"""The shards of one replica: placed in its placement group, connected, watched."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fmoe_ray.actors.channel import ShardChannel
from fmoe_ray.actors.resources import shard_resources
from fmoe_ray.actors.shard import RemoteShard
from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Backend
from fmoe_ray.errors import CapacityError, FmoeError, ShardLostError, StepTimeoutError

logger = logging.getLogger(__name__)

_PID_TIMEOUT_S = 10.0


class ShardGang:
    """Bundle i holds shard i; the replica itself sits in bundle 0."""

    def __init__(self, settings: Settings, backend: Backend, group: PlacementGroup) -> None:
        self._settings = settings
        self._backend = backend
        self._group = group
        self._runs: list[asyncio.Future[Any]] = []
        self._actors: Sequence[Any] = ()

    async def start(self) -> ShardChannel:
        """Creates the shards and waits until they have loaded.

        Raises what loading raises in a shard, ShardLostError if one dies meanwhile, CapacityError
        if they are not ready within `shards.start_timeout_s`.
        """
        shards = self._settings.shards
        channel = ShardChannel(num_shards=shards.num_shards, host=ray.util.get_node_ip_address())
        self._actors = [
            RemoteShard.options(
                **shard_resources(self._settings),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote(self._settings, self._backend, rank, channel.address, channel.token)
            for rank in range(shards.num_shards)
        ]
        # Each actor takes one call after the other: rank 0 has its port before it runs.
        meeting = self._actors[0].host_meeting.remote()
        self._runs = [
            asyncio.wrap_future(actor.run.remote(meeting).future()) for actor in self._actors
        ]
        connected = asyncio.ensure_future(channel.connected())
        await asyncio.wait(
            (connected, *self._runs),
            timeout=shards.start_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not connected.done():
            connected.cancel()
            missing = f"{channel.num_connected} of {shards.num_shards} shards are ready"
            await channel.close()
            raise self._first_error() or CapacityError(
                f"{missing} after {shards.start_timeout_s:g} s (shards.start_timeout_s); "
                f"see `ray status` for resources that are missing"
            )
        return channel

    async def ended(self, timeout_s: float) -> None:
        """Waits until the shards, told to leave, have given back what they hold."""
        _, left = await asyncio.wait(self._runs, timeout=timeout_s)
        if left:
            logger.warning("%d shards had not left after %g s", len(left), timeout_s)

    async def lost(self) -> ShardLostError:
        """Watches, without polling: waits for ever while all shards live."""
        await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        error = self._first_error()
        if isinstance(error, ShardLostError):
            return error
        return ShardLostError(f"an expert shard has stopped: {error}")

    async def pids(self) -> list[int]:
        """Raises StepTimeoutError if a shard does not answer."""
        try:
            async with asyncio.timeout(_PID_TIMEOUT_S):
                return list(await asyncio.gather(*[actor.pid.remote() for actor in self._actors]))
        except TimeoutError as error:
            raise StepTimeoutError(
                f"a shard has not told its process id for {_PID_TIMEOUT_S:g} s"
            ) from error

    def _first_error(self) -> FmoeError | None:
        for rank, run in enumerate(self._runs):
            error = run.exception() if run.done() else None
            if isinstance(error, RayTaskError):
                cause = error.cause
                return cause if isinstance(cause, FmoeError) else ShardLostError(str(error))
            if isinstance(error, RayActorError):
                return ShardLostError(f"expert shard {rank} died; this replica is being replaced")
        return None
