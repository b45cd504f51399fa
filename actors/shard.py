"""ExpertShard: one device's step runner behind a channel to its replica."""

import asyncio
import os

import ray

from fmoe_ray.actors.channel import serve_shard
from fmoe_ray.actors.map_link import shard_settings, sharing_maps
from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Backend
from fmoe_ray.errors import EngineError


class ExpertShard:
    """Loads the model and carries out steps. All shards of a replica run the same steps."""

    def __init__(
        self, settings: Settings, backend: Backend, rank: int, address: str, token: str
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._rank = rank
        self._address = address
        self._token = token

    async def run(self) -> None:
        """Returns when the replica says so; the replica sees the call fail if the process dies.

        Raises what loading raises, and EngineError when no later step can succeed.
        """
        # Loading blocks for minutes; the actor's loop has to answer Ray meanwhile.
        settings = shard_settings(self._settings)
        runner = await asyncio.to_thread(self._backend.load_runner, settings)
        try:
            async with sharing_maps(self._settings, runner, self._rank):
                await serve_shard(self._address, self._token, self._rank, runner.info, runner.step)
        finally:
            await runner.close()


class ExpertShardActor(ExpertShard):
    async def run(self) -> None:
        """As above, but a failed engine takes the process along: a device may be stuck in it."""
        try:
            await super().run()
        except EngineError:
            os._exit(1)

    def pid(self) -> int:
        return os.getpid()


# One rank alone is never restarted: the others would wait for it in a collective operation.
RemoteShard = ray.remote(max_restarts=0)(ExpertShardActor)
