"""What a step costs between replica and shards when computing costs nothing: over the channel, and
over gloo, which would have to carry plan and results as two sums of a fixed size.
"""

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fmoe_ray.actors.channel import Address, ShardChannel, serve_shard
from fmoe_ray.engine.messages import ExpertCounts, Row, RowResult, StepPlan, StepResult, StepStats
from fmoe_ray.engine.seat import Seat
from fmoe_ray.engine.stub_runner import StubRunner

_HOST = "127.0.0.1"
_TIMEOUT_S = 60.0
_NUM_WARM_UP = 50
_GLOO_BYTES = 4096
"""Room for the plan or the results of some 30 rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelTimes:
    """Microseconds a step, from the plan's encoding to the merged result."""

    transport: Literal["tcp", "gloo"]
    num_shards: int
    num_rows: int
    median_us: float
    p10_us: float
    p90_us: float


def bench_channel(*, num_shards: int, num_rows: int, num_steps: int) -> ChannelTimes:
    """`num_shards` processes that answer each plan at once. Raises TimeoutError."""
    durations_s = asyncio.run(_time_channel(num_shards, num_rows, num_steps))
    return _times("tcp", num_shards, num_rows, durations_s)


def bench_gloo(*, num_shards: int, num_steps: int) -> ChannelTimes:
    """Two sums of 4 KiB over the replica and its shards. Raises EngineError."""
    with socket.create_server((_HOST, 0)) as listener:
        seat = Seat(
            rank=0,
            num_shards=num_shards + 1,
            host=_HOST,
            port=listener.getsockname()[1],
            listener=listener,
        )
        arguments = [
            (seat.port, rank, num_shards + 1, num_steps) for rank in range(1, seat.num_shards)
        ]
        with _processes(_sum_up, arguments):
            durations_s = _time_sums(seat, num_steps)
    return _times("gloo", num_shards, 0, durations_s)


async def _time_channel(num_shards: int, num_rows: int, num_steps: int) -> list[float]:
    channel = ShardChannel(num_shards=num_shards, host=_HOST)
    durations_s = []
    arguments = [(channel.address, channel.token, rank) for rank in range(num_shards)]
    with _processes(_answer, arguments):
        async with asyncio.timeout(_TIMEOUT_S):
            await channel.connected()
            for step in range(_NUM_WARM_UP + num_steps):
                plan = _plan(step, num_rows)
                began = time.perf_counter()
                await channel.step(plan)
                durations_s.append(time.perf_counter() - began)
            await channel.close()
    return durations_s


def _answer(address: Address, token: str, rank: int) -> None:
    """A shard whose steps, as those of a step runner, are computed on a thread of their own."""
    with ThreadPoolExecutor(max_workers=1) as thread:

        async def step(plan: StepPlan) -> StepResult:
            return await asyncio.get_running_loop().run_in_executor(thread, _result, plan)

        asyncio.run(serve_shard(address, token, rank, StubRunner().info, step))


def _plan(step: int, num_rows: int) -> StepPlan:
    rows = [
        Row(request_id=row, slot=row, start=1000 + step, tokens=[row], samples=True)
        for row in range(num_rows)
    ]
    return StepPlan(step=step, rows=rows)


def _result(plan: StepPlan) -> StepResult:
    stats = StepStats(
        seconds=0.01,
        stall_seconds=0.001,
        bytes_on_demand=2**24,
        bytes_prefetched=2**25,
        hits=40,
        late=5,
        misses=3,
    )
    rows = [
        RowResult(
            request_id=row.request_id, token=row.slot, experts=ExpertCounts(hits=40, misses=3)
        )
        for row in plan.rows
    ]
    return StepResult(step=plan.step, rows=rows, stats=stats, routing_checksum=2**63)


def _sum_up(port: int, rank: int, size: int, num_steps: int) -> None:
    _time_sums(Seat(rank=rank, num_shards=size, host=_HOST, port=port), num_steps)


def _time_sums(seat: Seat, num_steps: int) -> list[float]:
    import torch

    from fmoe_ray.engine.process_group import open_group

    group = open_group(
        seat, torch.device("cpu"), meeting_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S
    )
    message = torch.zeros(_GLOO_BYTES, dtype=torch.uint8)
    durations_s = []
    for _ in range(_NUM_WARM_UP + num_steps):
        began = time.perf_counter()
        group.add_up(message)
        group.add_up(message)
        durations_s.append(time.perf_counter() - began)
    group.close()
    return durations_s


@contextmanager
def _processes(target: Callable[..., None], arguments: list[Any]) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()


def _times(
    transport: Literal["tcp", "gloo"], num_shards: int, num_rows: int, durations_s: list[float]
) -> ChannelTimes:
    ordered_us = sorted(duration * 1e6 for duration in durations_s[_NUM_WARM_UP:])
    return ChannelTimes(
        transport=transport,
        num_shards=num_shards,
        num_rows=num_rows,
        median_us=ordered_us[len(ordered_us) // 2],
        p10_us=ordered_us[len(ordered_us) // 10],
        p90_us=ordered_us[len(ordered_us) * 9 // 10],
    )
