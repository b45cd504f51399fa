"""The channel between replica and shards, without Ray."""

import asyncio
import socket
from asyncio import StreamWriter, Task
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from fmoe_ray.actors.channel import Address, Hello, ShardChannel, serve_shard
from fmoe_ray.engine.messages import Row, Sampling, StepPlan, StepResult
from fmoe_ray.engine.stub_runner import StubRunner
from fmoe_ray.errors import EngineError, ShardLostError, UnavailableError

LIMIT_S = 10.0


def plan(step: int, token: int = ord("a")) -> StepPlan:
    first = step == 1
    row = Row(
        request_id=1,
        slot=0,
        start=step - 1,
        tokens=[token],
        samples=True,
        sampling=Sampling(temperature=0) if first else None,
    )
    return StepPlan(step=step, rows=[row])


def with_channel(num_shards: int, body: Callable[[ShardChannel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            channel = ShardChannel(num_shards=num_shards, host="127.0.0.1")
            try:
                await body(channel)
            finally:
                await channel.close()

    asyncio.run(run())


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4) + body


def start_shard(channel: ShardChannel, rank: int, token: str | None = None) -> asyncio.Task[None]:
    runner = StubRunner()
    return asyncio.create_task(
        serve_shard(channel.address, token or channel.token, rank, runner.info, runner.step)
    )


async def leave(channel: ShardChannel, *shards: asyncio.Task[None]) -> None:
    await channel.close()
    await asyncio.gather(*shards)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_plan_goes_to_all_shards_and_the_first_rank_answers(num_shards: int) -> None:
    async def body(channel: ShardChannel) -> None:
        shards = [start_shard(channel, rank) for rank in reversed(range(num_shards))]
        await channel.connected()
        assert channel.info == StubRunner().info
        for step, letter in ((1, "a"), (2, "b")):
            result = await channel.step(plan(step, ord(letter)))
            assert (result.step, result.rows[0].token) == (step, ord(letter) + 1)
        await leave(channel, *shards)

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body(ShardChannel(num_shards=num_shards, host="127.0.0.1"))

    asyncio.run(run())


def test_who_does_not_know_the_token_is_no_shard(caplog: pytest.LogCaptureFixture) -> None:
    async def body(channel: ShardChannel) -> None:
        connected = asyncio.ensure_future(channel.connected())
        impostor = start_shard(channel, 0, token="guess")
        with pytest.raises(UnavailableError, match="the replica of shard 0 is gone"):
            await impostor
        big = (2**17).to_bytes(4)
        foreign = frame(Hello("\u00e9", 0, StubRunner().info))
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4junk", b"\0\0", big, foreign):
            reader, writer = await asyncio.open_connection(*channel.address)
            writer.write(junk)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        honest = start_shard(channel, 0)
        await connected
        assert (await channel.step(plan(1))).rows[0].token == ord("b")
        await leave(channel, honest)

    with_channel(1, body)
    assert caplog.text.count("no shard's") == 5


def test_a_rank_can_be_taken_once() -> None:
    async def body(channel: ShardChannel) -> None:
        connected = asyncio.ensure_future(channel.connected())
        first, second = start_shard(channel, 0), start_shard(channel, 0)
        done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [UnavailableError]
        assert channel.num_connected == 1
        beyond = start_shard(channel, 2)
        with pytest.raises(UnavailableError):
            await beyond
        other = start_shard(channel, 1)
        await connected
        await leave(channel, other, *({first, second} - done))

    with_channel(2, body)


async def step_in_flight(channel: ShardChannel) -> tuple[StreamWriter, Task[StepResult]]:
    """The only shard's end of its connection, and a step that waits for that shard."""
    connected = asyncio.ensure_future(channel.connected())
    _, writer = await asyncio.open_connection(*channel.address)
    writer.write(frame(Hello(channel.token, 0, StubRunner().info)))
    await connected
    step = asyncio.create_task(channel.step(plan(1)))
    await asyncio.sleep(0)
    return writer, step


def test_a_shard_whose_process_dies_ends_the_step_in_flight() -> None:
    async def body(channel: ShardChannel) -> None:
        writer, step = await step_in_flight(channel)
        writer.close()
        with pytest.raises(ShardLostError, match="expert shard 0 died"):
            await step

    with_channel(1, body)


@pytest.mark.parametrize("bad", [b"\0\0\0\4junk", b"\xff\xff\xff\xff"])
def test_a_shard_that_sends_what_cannot_be_read_ends_the_step_in_flight(bad: bytes) -> None:
    async def body(channel: ShardChannel) -> None:
        writer, step = await step_in_flight(channel)
        writer.write(bad)
        with pytest.raises(ShardLostError, match="expert shard 0: "):
            await step
        writer.close()

    with_channel(1, body)


def test_results_that_do_not_fit_each_other_end_the_step_in_flight() -> None:
    async def body(channel: ShardChannel) -> None:
        async def answer_nothing(plan: StepPlan) -> StepResult:
            return msgspec.structs.replace(await StubRunner().step(plan), rows=[])

        info = StubRunner().info
        other = asyncio.create_task(
            serve_shard(channel.address, channel.token, 1, info, answer_nothing)
        )
        first = start_shard(channel, 0)
        await channel.connected()
        with pytest.raises(ShardLostError, match="expert shard"):
            await channel.step(plan(1))
        await leave(channel, first, other)

    with_channel(2, body)


def test_who_says_no_hello_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with asyncio.timeout(LIMIT_S):
            channel = ShardChannel(num_shards=1, host="127.0.0.1", hello_timeout_s=0.05)
            connected = asyncio.ensure_future(channel.connected())
            reader, writer = await asyncio.open_connection(*channel.address)
            assert await reader.read() == b""
            writer.close()
            connected.cancel()
            await channel.close()

    asyncio.run(body())
    assert "no hello" in caplog.text


def test_a_replica_that_cannot_be_reached_is_named() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = Address(*free.getsockname())
        runner = StubRunner()
        with pytest.raises(UnavailableError, match=f"shard 3 does not reach .*:{address.port}"):
            await serve_shard(address, "token", 3, runner.info, runner.step)

    asyncio.run(body())


def test_a_shard_leaves_when_its_replica_dies() -> None:
    async def body() -> None:
        def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with (
            asyncio.timeout(LIMIT_S),
            await asyncio.start_server(die, "127.0.0.1") as replica,
        ):
            address = Address(*replica.sockets[0].getsockname())
            runner = StubRunner()
            with pytest.raises(UnavailableError, match="the replica of shard 3 is gone"):
                await serve_shard(address, "token", 3, runner.info, runner.step)

    asyncio.run(body())


def test_a_lost_shard_ends_the_step_in_flight_and_all_later_ones() -> None:
    async def body(channel: ShardChannel) -> None:
        async def never(_: StepPlan) -> StepResult:
            await asyncio.Event().wait()
            raise AssertionError

        info = StubRunner().info
        shard = asyncio.create_task(serve_shard(channel.address, channel.token, 0, info, never))
        await channel.connected()
        step = asyncio.create_task(channel.step(plan(1)))
        await asyncio.sleep(0)
        channel.fail(ShardLostError("shard 0 died"))
        for attempt in (step, channel.step(plan(2))):
            with pytest.raises(ShardLostError, match="shard 0 died"):
                await attempt
        shard.cancel()
        await asyncio.gather(shard, return_exceptions=True)

    with_channel(1, body)


def test_a_shard_that_gives_up_says_why() -> None:
    async def body(channel: ShardChannel) -> None:
        async def give_up(_: StepPlan) -> StepResult:
            raise EngineError("the device is gone")

        info = StubRunner().info
        shard = asyncio.create_task(serve_shard(channel.address, channel.token, 0, info, give_up))
        await channel.connected()
        with pytest.raises(ShardLostError, match="shard 0: the device is gone"):
            await channel.step(plan(1))
        with pytest.raises(EngineError):
            await shard

    with_channel(1, body)


def test_a_hello_says_which_rank() -> None:
    hello = Hello("token", 3, StubRunner().info)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello)
    assert decoded == hello
