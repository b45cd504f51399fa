"""Policies and predictors written in Python inside the offloader: its threads and the GIL."""

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from clusters.waiting import within

from fmoe_ray.cache import Geometry, HostStore, Offloader
from fmoe_ray.errors import ConfigError, EngineError
from fmoe_ray.policy import (
    ExpertCache,
    GateObservation,
    Instruction,
    IterationContext,
    IterationStarted,
    Policy,
    Prediction,
    Predictor,
    VictimNeeded,
)

GEOMETRY = Geometry(3, 4, 2)
SIZE = 12
NUM_SLOTS = 5


class LowestVictim(Policy):
    """Loads on demand, and prefetches whatever is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[int] = []

    def predicted(self, prediction: Prediction, cache: ExpertCache) -> list[Instruction]:
        self.wanted = [expert for expert in range(SIZE) if cache.is_absent(expert)]
        return []

    def link_free(self, cache: ExpertCache) -> list[Instruction]:
        while self.wanted and cache.num_free > 0:
            expert = self.wanted.pop()
            if cache.is_absent(expert):
                return [Instruction.start_copy(expert, -1)]
        return []

    def victim(self, needed: VictimNeeded, cache: ExpertCache) -> int:
        return next((expert for expert in range(SIZE) if cache.can_evict(expert)), -1)


class ScriptedPredictor(Predictor):
    """Waits for `gate` at the start of every iteration; fails where it is told to."""

    def __init__(self, gate: threading.Event, fails: bool = False) -> None:
        super().__init__(GEOMETRY)
        self.gate = gate
        self.fails = fails
        self.num_gates = 0
        self.has_learnt = threading.Event()

    def iteration_started(self, context: IterationContext) -> list[Prediction]:
        assert self.gate.wait(timeout=60)
        p = np.full((1, 3, 4), 0.25, dtype=np.float32)
        return [Prediction(context.iteration, -1, 0, p)]

    def gate_observed(self, gate: GateObservation) -> list[Prediction]:
        if self.fails:
            raise LookupError("no such map")
        self.num_gates += 1
        return []

    def iteration_ended(self) -> list[Prediction]:
        assert self.num_gates % 3 == 0
        self.has_learnt.set()
        return []

    def request_ended(self, request: int) -> None:
        pass

    def is_synchronous(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def end_of_a_deadlock() -> Iterator[None]:
    """A thread that waits with the GIL stops Python and every time-out written in it; this one
    needs none: it shows all stacks and ends the process.
    """
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def make_store() -> HostStore:
    store = HostStore.create("", "test", SIZE, 1000)
    for index in range(SIZE):
        store.blob(index)[:] = index + 1
    store.seal()
    return store


def run_iteration(offloader: Offloader, seed: int) -> None:
    random = np.random.default_rng(seed)
    offloader.begin_iteration(
        np.array([7], np.int64), np.array([1], np.uint8), np.array([3], np.int32)
    )
    for layer in range(3):
        chosen = random.choice(4, size=(1, 3), replace=False).astype(np.int32)
        offloader.request(layer, chosen, np.zeros(1, np.int32))
        offloader.publish_gate(layer, np.full((1, 4), 0.25, np.float32))
        computed = []
        while ready := offloader.wait():
            for expert, slot in ready:
                assert (offloader.arena[slot] == layer * 4 + expert + 1).all()
                computed.append(expert)
            offloader.release([expert for expert, _ in ready])
        assert sorted(computed) == sorted(chosen[0].tolist())
    offloader.end_iteration()


def test_a_stalled_predictor_never_blocks_inference() -> None:
    gate = threading.Event()
    predictor = ScriptedPredictor(gate)
    with Offloader(
        make_store(),
        GEOMETRY,
        NUM_SLOTS,
        "lru",
        policy_object=LowestVictim(),
        predictor_object=predictor,
    ) as offloader:
        for seed in range(20):
            run_iteration(offloader, seed)
        assert offloader.counters().iterations_dropped == 16
        assert predictor.num_gates == 0
        gate.set()
        assert predictor.has_learnt.wait(timeout=60)
        run_iteration(offloader, 20)
        offloader.check_integrity()


def test_policy_predictor_and_inference_share_the_gil_without_deadlock() -> None:
    gate = threading.Event()
    gate.set()
    with Offloader(
        make_store(),
        GEOMETRY,
        NUM_SLOTS,
        "lru",
        policy_object=LowestVictim(),
        predictor_object=ScriptedPredictor(gate),
    ) as offloader:
        for seed in range(100):
            run_iteration(offloader, seed)
        offloader.check_integrity()


def num_threads() -> int:
    """Of the process, the native ones too."""
    return len(os.listdir("/proc/self/task"))


def test_an_offloader_that_is_dropped_ends_its_python_threads() -> None:
    before = num_threads()
    gate = threading.Event()
    gate.set()
    offloader = Offloader(
        make_store(),
        GEOMETRY,
        NUM_SLOTS,
        "lru",
        policy_object=LowestVictim(),
        predictor_object=ScriptedPredictor(gate),
    )
    run_iteration(offloader, 0)
    assert num_threads() > before
    del offloader
    gc.collect()
    within(10, lambda: num_threads() == before)


def test_a_predictor_that_fails_ends_the_engine_with_its_message() -> None:
    gate = threading.Event()
    gate.set()
    with Offloader(
        make_store(),
        GEOMETRY,
        NUM_SLOTS,
        "lru",
        policy_object=LowestVictim(),
        predictor_object=ScriptedPredictor(gate, fails=True),
    ) as offloader:
        with pytest.raises(EngineError, match="no such map"):
            for seed in range(10_000):
                run_iteration(offloader, seed)
        with pytest.raises(EngineError, match="no such map"):
            offloader.counters()


class FailsOnce(LowestVictim):
    """Its second iteration does not begin."""

    num_started = 0

    def iteration_started(self, event: IterationStarted, cache: ExpertCache) -> list[Instruction]:
        self.num_started += 1
        if self.num_started == 2:
            raise LookupError("no such layer")
        return []


@pytest.mark.parametrize("predicts", [False, True])
def test_an_iteration_that_does_not_begin_can_be_aborted(predicts: bool) -> None:
    """It never reached the predictor, which is not told that it was abandoned."""
    gate = threading.Event()
    gate.set()
    with Offloader(
        make_store(),
        GEOMETRY,
        NUM_SLOTS,
        "lru",
        policy_object=FailsOnce(),
        predictor_object=ScriptedPredictor(gate) if predicts else None,
    ) as offloader:
        run_iteration(offloader, 0)
        with pytest.raises(LookupError, match="no such layer"):
            run_iteration(offloader, 1)
        offloader.abort_iteration()
        run_iteration(offloader, 2)
        offloader.check_integrity()


def test_a_predictor_without_its_policy_is_refused() -> None:
    with make_store() as store, pytest.raises(ConfigError, match="policy_object"):
        Offloader(store, GEOMETRY, 2, "lru", predictor_object=ScriptedPredictor(threading.Event()))
