"""The shards of one replica as processes of this machine, without Ray: for checks and measurements.

Plans go to them over pipes; what they say to each other is what they say in a cluster.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fmoe_ray.config import Settings
from fmoe_ray.engine.messages import StepPlan, StepResult
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.engine.seat import Seat
from fmoe_ray.engine.shard_results import merge_results
from fmoe_ray.errors import EngineError, FmoeError, ShardLostError

HOST = "127.0.0.1"


class ShardProcess:
    """One process that loads models as a shard, one after the other, and runs their steps."""

    def __init__(self, timeout_s: float, gpu: int | None = None) -> None:
        """Sees the GPU of this number, or whatever this process sees."""
        context = multiprocessing.get_context("spawn")
        self._timeout_s = timeout_s
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, gpu), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, name: str, *arguments: object) -> None:
        try:
            self._connection.send((name, arguments))
        except OSError as error:
            raise ShardLostError(f"process {self.process.pid} of a shard is gone") from error

    def answer(self) -> Any:
        """Of what it was told. Raises what the shard raises, StepTimeoutError, ShardLostError."""
        try:
            if not self._connection.poll(self._timeout_s):
                raise EngineError(f"a shard gave no answer within {self._timeout_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ShardLostError(f"process {self.process.pid} of a shard is gone") from error
        if isinstance(answer, FmoeError):
            raise answer
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join(self._timeout_s)  # it was killed
        self._connection.close()


class LocalShards:
    """A loaded replica: `run` has the plan carried out by all of its shards."""

    def __init__(self, processes: list[ShardProcess], settings: Settings) -> None:
        """As many shards as the settings say, on the first of `processes`.

        Raises what loading raises in the first shard that fails.
        """
        self.processes = processes[: settings.shards.num_shards]
        assert len(self.processes) == settings.shards.num_shards, "too few processes"
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            for rank, process in enumerate(self.processes):
                seat = Seat(
                    rank=rank,
                    num_shards=len(self.processes),
                    host=HOST,
                    port=listener.getsockname()[1],
                    listener=listener if rank == 0 else None,
                )
                process.tell("load", settings, seat)
            self.infos: list[RunnerInfo] = self._answers()

    @property
    def info(self) -> RunnerInfo:
        return self.infos[0]

    def run(self, plan: StepPlan) -> StepResult:
        """Raises EngineError when no later step can succeed."""
        for process in self.processes:
            process.tell("run", plan)
        return merge_results(self._answers())

    def close(self) -> None:
        """Gives the model up; the processes can load another one. Raises what that raises."""
        for process in self.processes:
            process.tell("close")
        self._answers()

    def _answers(self) -> list[Any]:
        answers, errors = [], []
        for process in self.processes:
            try:
                answers.append(process.answer())
            except FmoeError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers


@contextmanager
def shard_processes(
    count: int, *, timeout_s: float = 120.0, gpus: bool = False
) -> Iterator[list[ShardProcess]]:
    """Processes for `LocalShards`, each of which answers within `timeout_s`; with `gpus`, each
    sees one of its own.
    """
    processes = [ShardProcess(timeout_s, number if gpus else None) for number in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def _serve(connection: Connection, gpu: int | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # before torch looks
    from fmoe_ray.engine.step_runner import StepRunner

    runner: StepRunner | None = None

    def load(settings: Settings, seat: Seat) -> RunnerInfo:
        nonlocal runner
        runner = StepRunner.load(settings, seat=seat)
        return runner.info

    def run(plan: StepPlan) -> StepResult:
        assert runner is not None
        return runner.run(plan)

    def close() -> None:
        nonlocal runner
        assert runner is not None
        try:
            runner.check_integrity()
        finally:
            runner.shutdown()
            runner = None  # the last to hold its memory

    commands: dict[str, Callable[..., Any]] = {"load": load, "run": run, "close": close}
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = commands[name](*arguments)
        except FmoeError as error:
            answer = error
        connection.send(answer)
