"""The direct channel between a replica and its shards: one message a step each way, over TCP.

Knows no Ray. Ray places and watches the shards; it carries none of their traffic. A message is a
length of four bytes and msgpack; docs/benchmarks has this beside ZeroMQ and gloo.
"""

import asyncio
import hmac
import logging
import secrets
import socket
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.engine.shard_results import merge_results
from fmoe_ray.errors import EngineError, ShardLostError, UnavailableError

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 2**28  # more is noise taken for a length
_MAX_HELLO_BYTES = 2**16  # nobody unknown makes the replica hold more
_HELLO_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 30.0


class Address(NamedTuple):
    host: str
    port: int


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


_hello = msgspec.msgpack.Decoder(Hello)
_from_shard = msgspec.msgpack.Decoder(Done | Failed)
_from_replica = msgspec.msgpack.Decoder(Run | Leave)
_encode = msgspec.msgpack.Encoder().encode


class ShardChannel:
    """The replica's end: a `Runner` that sends each plan to all shards and awaits all results."""

    def __init__(
        self, *, num_shards: int, host: str, hello_timeout_s: float = _HELLO_TIMEOUT_S
    ) -> None:
        """Listens at a free port of `host`. Needs a running event loop."""
        self._num_shards = num_shards
        self._hello_timeout_s = hello_timeout_s
        self._socket = socket.create_server((host, 0))
        self.address = Address(host, self._socket.getsockname()[1])
        self.token = secrets.token_hex(32)
        self._server: asyncio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._writers: dict[int, StreamWriter] = {}
        self._infos: dict[int, RunnerInfo] = {}
        self._results: dict[int, StepResult] = {}
        self._all_here = asyncio.Event()
        self._answer: asyncio.Future[StepResult] | None = None
        self._failure: EngineError | None = None

    @property
    def num_connected(self) -> int:
        return len(self._infos)

    @property
    def info(self) -> RunnerInfo:
        return self._infos[0]

    async def connected(self) -> None:
        """Waits until all shards have loaded and said hello. The caller bounds the wait."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, sock=self._socket)
        await self._all_here.wait()

    async def step(self, plan: StepPlan) -> StepResult:
        """The merged result, once all shards have theirs. Raises the error given to `fail`."""
        if self._failure is not None:
            raise self._failure
        assert self._answer is None, "a step is in flight"
        self._results.clear()
        self._answer = asyncio.get_running_loop().create_future()
        message = _frame(Run(plan))
        try:
            for writer in self._writers.values():
                writer.write(message)
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
        """Tells the shards to leave; does not wait until they have."""
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for writer in self._writers.values():
            writer.write(_frame(Leave()))
            writer.close()
        if self._server is not None:
            self._server.close()
        self._socket.close()

    def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.create_task(self._read(reader, writer))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _read(self, reader: StreamReader, writer: StreamWriter) -> None:
        rank = None
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                hello = await _receive(reader, max_bytes=_MAX_HELLO_BYTES)
            rank = self._welcome(_hello.decode(hello), writer)
            while True:
                message = _from_shard.decode(await _receive(reader))
                if isinstance(message, Failed):
                    self.fail(ShardLostError(f"expert shard {rank}: {message.message}"))
                else:
                    self._collect(rank, message.result)
        except TimeoutError:
            limit_s = self._hello_timeout_s
            logger.warning("a connection that said no hello within %g s was closed", limit_s)
        except (msgspec.DecodeError, _BadMessageError, ValueError, TypeError) as error:
            # Of a shard's results too, where they do not fit each other: nobody answers any more.
            if rank is None:
                logger.warning("a connection that is no shard's was closed: %s", error)
            else:
                self.fail(ShardLostError(f"expert shard {rank}: {error}; this replica is replaced"))
        except (IncompleteReadError, ConnectionError):
            if rank is not None:
                self.fail(ShardLostError(f"expert shard {rank} died; this replica is replaced"))
        finally:
            if rank is None:
                writer.close()

    def _welcome(self, hello: Hello, writer: StreamWriter) -> int:
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise _BadMessageError("its hello has a wrong token")
        if not 0 <= hello.rank < self._num_shards or hello.rank in self._infos:
            raise _BadMessageError(
                f"rank {hello.rank} is taken or beyond {self._num_shards} shards"
            )
        self._writers[hello.rank] = writer
        self._infos[hello.rank] = hello.info
        if self.num_connected == self._num_shards:
            self._all_here.set()
        return hello.rank

    def _collect(self, rank: int, result: StepResult) -> None:
        self._results[rank] = result
        if len(self._results) < self._num_shards or self._answer is None or self._answer.done():
            return
        self._answer.set_result(merge_results([self._results[r] for r in range(self._num_shards)]))


async def serve_shard(
    address: Address,
    token: str,
    rank: int,
    info: RunnerInfo,
    step: Callable[[StepPlan], Awaitable[StepResult]],
) -> None:
    """The shard's end: carries out plans until it is told to leave.

    Raises EngineError, after telling the replica, when no later step can succeed, and
    UnavailableError when the replica is gone or cannot be reached.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*address)
    except OSError as error:  # a time-out too
        raise UnavailableError(
            f"shard {rank} does not reach its replica at {address.host}:{address.port} within "
            f"{_CONNECT_TIMEOUT_S:g} s: {error!r}"
        ) from error
    try:
        writer.write(_frame(Hello(token, rank, info)))
        while isinstance(message := _from_replica.decode(await _receive(reader)), Run):
            writer.write(_frame(Done(await step(message.plan))))
    except EngineError as error:
        writer.write(_frame(Failed(str(error))))
        raise
    except (IncompleteReadError, ConnectionError) as error:
        raise UnavailableError(f"the replica of shard {rank} is gone") from error
    finally:
        writer.close()


class _BadMessageError(Exception):
    """No shard of this replica sends such a thing."""


def _frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(_LENGTH_BYTES) + body


async def _receive(reader: StreamReader, *, max_bytes: int = _MAX_MESSAGE_BYTES) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if length > max_bytes:
        raise _BadMessageError(f"it sent a message of {length} bytes")
    return await reader.readexactly(length)
