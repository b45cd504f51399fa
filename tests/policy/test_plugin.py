"""Policies and predictors written in Python run where native ones do."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmoe_ray import policy as fp

GEOMETRY = fp.Geometry(3, 5, 2)


class PythonLru(fp.Policy):
    def __init__(self) -> None:
        super().__init__()
        self.last_use = dict.fromkeys(range(15), 0)
        self.clock = 0

    def use(self, expert: int) -> None:
        self.clock += 1
        self.last_use[expert] = self.clock

    def gate_requested(
        self, event: fp.GateRequested, cache: fp.ExpertCache
    ) -> list[fp.Instruction]:
        for expert in event.needed:
            self.use(expert)
        return []

    def victim(self, needed: fp.VictimNeeded, cache: fp.ExpertCache) -> int:
        evictable = [expert for expert in cache.residents if cache.can_evict(expert)]
        return min(evictable, key=self.last_use.__getitem__, default=-1)


class Follower(fp.Predictor):
    """Predicts that the next layer chooses what this one did."""

    def gate_observed(self, gate: fp.GateObservation) -> list[fp.Prediction]:
        if gate.layer + 1 == GEOMETRY.num_layers:
            return []
        return [
            fp.Prediction(
                iteration=0,
                observed_layer=gate.layer,
                first_layer=gate.layer + 1,
                p=gate.probs[:, None],
            )
        ]


def commands(policy: fp.Policy, seed: int, num_slots: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    planner = fp.Planner(GEOMETRY, num_slots, policy)
    told = []
    for iteration in range(12):
        planner.start_iteration(iteration)
        for layer in range(GEOMETRY.num_layers):
            planner.request_gate(layer, rng.choice(5, 2, replace=False).tolist())
            for command in planner.take_commands():
                told.append((command.expert, command.slot))
                planner.copy_done(command.expert)
        planner.iteration_ended()
    return told


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), num_slots=st.integers(2, 15))
def test_an_lru_written_in_python_orders_what_the_native_one_does(
    seed: int, num_slots: int
) -> None:
    native = fp.make_policy("lru", geometry=GEOMETRY, num_slots=num_slots).policy
    assert commands(PythonLru(), seed, num_slots) == commands(native, seed, num_slots)


def test_methods_left_out_order_nothing() -> None:
    policy = PythonLru()
    planner = fp.Planner(GEOMETRY, 4, policy)
    assert policy.link_free(planner.cache) == []
    assert Follower(GEOMETRY).iteration_ended() == []
    assert not Follower(GEOMETRY).is_synchronous()
    assert not Follower(GEOMETRY).wants_speculative()


def test_a_policy_without_victim_says_so() -> None:
    class Undecided(fp.Policy):
        pass

    planner = fp.Planner(GEOMETRY, 1, Undecided())
    planner.start_iteration(0)
    planner.request_gate(0, [0])
    planner.copy_done(0)
    with pytest.raises(TypeError, match="must define victim"):
        planner.request_gate(1, [0])


def test_an_exception_of_a_python_policy_reaches_the_caller() -> None:
    class Broken(PythonLru):
        def link_free(self, cache: fp.ExpertCache) -> list[fp.Instruction]:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        fp.Planner(GEOMETRY, 1, Broken()).start_iteration(0)


def test_a_python_predictor_sees_copies_and_its_predictions_are_carried_out() -> None:
    class Prefetcher(PythonLru):
        def __init__(self) -> None:
            super().__init__()
            self.wanted: list[int] = []

        def predicted(
            self, prediction: fp.Prediction, cache: fp.ExpertCache
        ) -> list[fp.Instruction]:
            p = prediction.p[0, 0]
            first = prediction.first_layer * GEOMETRY.num_experts
            self.wanted = [first + int(j) for j in np.flatnonzero(p)]
            return []

        def link_free(self, cache: fp.ExpertCache) -> list[fp.Instruction]:
            while self.wanted and not cache.is_absent(self.wanted[0]):
                self.wanted.pop(0)
            return [fp.Instruction.start_copy(self.wanted.pop(0))] if self.wanted else []

    planner = fp.Planner(GEOMETRY, 15, Prefetcher())
    planner.start_iteration(0)
    probs = np.array([[0, 0.5, 0, 0.5, 0]], np.float32)
    for prediction in Follower(GEOMETRY).gate_observed(fp.GateObservation(0, probs)):
        planner.predicted(prediction)
    (command,) = planner.take_commands()
    assert command.expert == 6
    planner.copy_done(6)
    assert planner.take_commands()[0].expert == 8


def test_a_planner_keeps_its_policy_alive_and_lets_it_go() -> None:
    policy = PythonLru()
    there = weakref.ref(policy)
    planner = fp.Planner(GEOMETRY, 2, policy)
    del policy
    gc.collect()
    assert there() is not None
    planner.start_iteration(0)
    del planner
    gc.collect()
    assert there() is None
