"""The direct channel between a replica and its shards: one message a step each way, over ZeroMQ.

Knows no Ray. Ray places and watches the shards; it carries none of their traffic.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.errors import EngineError, ShardLostError

logger = logging.getLogger(__name__)

_LINGER_MS = 1000  # a last message may take this long to leave after the socket is closed


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A shard's first message. Whoever does not know the token is not answered."""

    token: str
    rank: int
    info: RunnerInfo


class Done(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The shard cannot go on and leaves."""

    message: str


class Run(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The replica needs the shard no more."""


_from_shard = msgspec.msgpack.Decoder(Hello | Done | Failed)
_from_replica = msgspec.msgpack.Decoder(Run | Leave)
_encode = msgspec.msgpack.Encoder().encode


class ShardChannel:
    """The replica's end: a `Runner` that sends each plan to all shards and awaits all results."""

    def __init__(self, *, num_shards: int, host: str) -> None:
        self._num_shards = num_shards
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self.token = secrets.token_hex(32)
        self._ranks: dict[bytes, int] = {}
        self._infos: dict[int, RunnerInfo] = {}
        self._results: dict[int, StepResult] = {}
        self._all_here = asyncio.Event()
        self._answer: asyncio.Future[StepResult] | None = None
        self._failure: EngineError | None = None
        self._receiver = asyncio.create_task(self._receive(), name="shard-channel")

    @property
    def num_connected(self) -> int:
        return len(self._infos)

    @property
    def info(self) -> RunnerInfo:
        return self._infos[0]

    async def connected(self) -> None:
        """Waits until all shards have loaded and said hello. The caller bounds the wait."""
        await self._all_here.wait()

    async def step(self, plan: StepPlan) -> StepResult:
        """Rank 0's result, once all ranks have theirs. Raises the error given to `fail`."""
        if self._failure is not None:
            raise self._failure
        assert self._answer is None, "a step is in flight"
        self._results.clear()
        self._answer = asyncio.get_running_loop().create_future()
        message = _encode(Run(plan))
        try:
            for identity in self._ranks:
                await self._socket.send_multipart((identity, message))
            return await self._answer
        finally:
            self._answer = None

    def fail(self, error: EngineError) -> None:
        """A shard is gone: the step in flight and all later ones raise `error`."""
        if self._failure is None:
            self._failure = error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    async def close(self) -> None:
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        for identity in self._ranks:
            await self._socket.send_multipart((identity, _encode(Leave())))
        self._socket.close()
        self._context.term()

    async def _receive(self) -> None:
        while True:
            identity, payload = await self._socket.recv_multipart()
            try:
                message = _from_shard.decode(payload)
            except msgspec.DecodeError as error:
                logger.warning("a message that no shard sends was dropped: %s", error)
                continue
            if isinstance(message, Hello):
                self._welcome(identity, message)
            elif identity not in self._ranks:
                logger.warning("a message without hello was dropped")
            elif isinstance(message, Failed):
                self.fail(ShardLostError(f"shard {self._ranks[identity]}: {message.message}"))
            else:
                self._collect(self._ranks[identity], message.result)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        is_ours = hmac.compare_digest(hello.token, self.token)
        if not is_ours or not 0 <= hello.rank < self._num_shards or hello.rank in self._infos:
            logger.warning("a hello with a wrong token or rank %d was dropped", hello.rank)
            return
        self._ranks[identity] = hello.rank
        self._infos[hello.rank] = hello.info
        if self.num_connected == self._num_shards:
            self._all_here.set()

    def _collect(self, rank: int, result: StepResult) -> None:
        self._results[rank] = result
        if len(self._results) < self._num_shards or self._answer is None or self._answer.done():
            return
        failed = [r for r in self._results.values() if r.error is not None]
        self._answer.set_result(failed[0] if failed else self._results[0])


async def serve_shard(
    address: str,
    token: str,
    rank: int,
    info: RunnerInfo,
    step: Callable[[StepPlan], Awaitable[StepResult]],
) -> None:
    """The shard's end: carries out plans until it is told to leave.

    Raises EngineError, after telling the replica, when no later step can succeed.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.connect(address)
    try:
        await socket.send(_encode(Hello(token, rank, info)))
        while isinstance(message := _from_replica.decode(await socket.recv()), Run):
            await socket.send(_encode(Done(await step(message.plan))))
    except EngineError as error:
        await socket.send(_encode(Failed(str(error))))
        raise
    finally:
        socket.close()
        context.term()
