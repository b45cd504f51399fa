"""ExpertShard: one device's step runner behind a channel to its replica."""

import asyncio
import logging
import os
import socket

import ray

from fmoe_ray.actors.channel import Address, serve_shard
from fmoe_ray.actors.map_link import shard_settings, sharing_maps
from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Backend
from fmoe_ray.engine.runner import LocalRunner
from fmoe_ray.engine.seat import Seat
from fmoe_ray.errors import EngineError

logger = logging.getLogger(__name__)


class ExpertShard:
    """Loads the model and carries out steps. All shards of a replica run the same steps."""

    def __init__(
        self, settings: Settings, backend: Backend, rank: int, address: Address, token: str
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._rank = rank
        self._address = address
        self._token = token
        self._listener: socket.socket | None = None

    async def host_meeting(self) -> Address:
        """Asked of rank 0: a port of this node that is the shards' own until they meet at it."""
        host = ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0))
        return Address(host, self._listener.getsockname()[1])

    async def run(self, meeting: Address) -> None:
        """Meets the other shards, loads, serves. Returns when the replica says so; the replica sees
        the call fail if the process dies.

        Raises what loading raises, and EngineError when no later step can succeed.
        """
        seat = Seat(
            rank=self._rank,
            num_shards=self._settings.shards.num_shards,
            host=meeting.host,
            port=meeting.port,
            listener=self._listener,
        )
        # Loading blocks for minutes; the actor's loop has to answer Ray meanwhile.
        runner = await asyncio.to_thread(
            self._backend.load_runner, shard_settings(self._settings), progress=None, seat=seat
        )
        await self._serve(runner)

    async def _serve(self, runner: LocalRunner) -> None:
        try:
            async with sharing_maps(self._settings, runner, self._rank):
                await serve_shard(self._address, self._token, self._rank, runner.info, runner.step)
        finally:
            await runner.close()


class ExpertShardActor(ExpertShard):
    async def _serve(self, runner: LocalRunner) -> None:
        """As above, but a failed engine takes the process along: a device may be stuck in it."""
        try:
            await super()._serve(runner)
        except EngineError as error:
            logger.error("expert shard %d leaves: %s", self._rank, error)
            os._exit(1)

    def pid(self) -> int:
        return os.getpid()


# One rank alone is never restarted: the others would wait for it in a collective operation.
RemoteShard = ray.remote(max_restarts=0)(ExpertShardActor)
