"""The channel between replica and shards, without Ray."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from fmoe_ray.actors.channel import Hello, ShardChannel, serve_shard
from fmoe_ray.engine.messages import Row, Sampling, StepPlan, StepResult
from fmoe_ray.engine.stub_runner import StubRunner
from fmoe_ray.errors import EngineError, ShardLostError

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


def start_shard(channel: ShardChannel, rank: int, token: str | None = None) -> asyncio.Task[None]:
    runner = StubRunner()
    return asyncio.create_task(
        serve_shard(channel.address, token or channel.token, rank, runner.info, runner.step)
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_plan_goes_to_all_shards_and_the_first_rank_answers(num_shards: int) -> None:
    async def body(channel: ShardChannel) -> None:
        shards = [start_shard(channel, rank) for rank in reversed(range(num_shards))]
        await channel.connected()
        assert channel.info == StubRunner().info
        for step, letter in ((1, "a"), (2, "b")):
            result = await channel.step(plan(step, ord(letter)))
            assert (result.step, result.rows[0].token) == (step, ord(letter) + 1)
        await channel.close()
        await asyncio.gather(*shards)  # told to leave

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body(ShardChannel(num_shards=num_shards, host="127.0.0.1"))

    asyncio.run(run())


def test_who_does_not_know_the_token_is_no_shard() -> None:
    async def body(channel: ShardChannel) -> None:
        impostor = start_shard(channel, 0, token="guess")
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.connect(channel.address)
        for junk in (b"", b"junk", msgspec.msgpack.encode({"type": "Done"})):
            await stranger.send(junk)
        honest = start_shard(channel, 0)
        await channel.connected()
        assert (await channel.step(plan(1))).rows[0].token == ord("b")
        for task in (impostor, honest):
            task.cancel()
        await asyncio.gather(impostor, honest, return_exceptions=True)
        stranger.close(linger=0)

    with_channel(1, body)


def test_a_rank_can_be_taken_once() -> None:
    async def body(channel: ShardChannel) -> None:
        shards = [start_shard(channel, 0), start_shard(channel, 0)]
        await asyncio.sleep(0.1)
        assert channel.num_connected == 1
        shards.append(start_shard(channel, 1))
        await channel.connected()
        for task in shards:
            task.cancel()
        await asyncio.gather(*shards, return_exceptions=True)

    with_channel(2, body)


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
