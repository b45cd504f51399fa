"""Replays a routing trace against a policy over a modelled link; the only user of the native class.

Times are in units of one layer's compute. The link model is described in native fmoe/simulator.h.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fmoe_ray import _native
from fmoe_ray.errors import ConfigError
from fmoe_ray.policy import Policy, Predictor
from fmoe_ray.trace.format import RoutingTrace

Sequences = Sequence[tuple[int, int]]
"""(start, length) of each, in tokens of the trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """Of the experts that gates chose, the part that the prediction in force had foreseen."""

    top_k: float
    """Foreseen among the K most probable."""
    top_2k: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Totals of the measured sequences. time = compute + stall."""

    num_steps: int
    num_tokens: int
    """Rows of all steps; equal to the steps where one sequence runs at a time."""
    time: float
    compute: float
    stall: float
    decode_tokens: int
    """Rows of the steps without a prefill."""
    decode_time: float
    """Of those steps."""
    request_times: tuple[float, ...]
    """Of each sequence, from its first step to its last; empty where several run together."""
    hits: int
    """Ready when the gate asked."""
    late: int
    """Requested, not ready."""
    misses: int
    """Not requested."""
    on_demand_loads: int
    prefetch_loads: int
    prefetches_used: int
    prefetches_wasted: int
    """Evicted or cancelled before any gate asked for them."""
    prefetches_cancelled: int
    """Of those, stopped before the copy was done."""
    evictions: int
    recall: dict[int, Recall]
    """By distance: of the newest prediction made at least that many layers before. Distances for
    which the policy's predictor makes none are left out."""
    learn_s: float
    """Wall-clock seconds of the predictor over the sequences it learned from."""
    run_s: float
    """Wall-clock seconds of the measured run."""

    @property
    def time_per_token(self) -> float:
        return self.time / self.num_tokens

    @property
    def time_per_decode_token(self) -> float:
        return self.decode_time / self.decode_tokens

    @property
    def time_to_first_token(self) -> float:
        """Mean time of the steps with a prefill; needs a trace that has some."""
        return (self.time - self.decode_time) / (self.num_tokens - self.decode_tokens)

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.late + self.misses)

    @property
    def num_loads(self) -> int:
        return self.on_demand_loads + self.prefetch_loads


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How fast a policy that knows the future is, in time per token."""

    belady: float
    """Evicts what is needed farthest in the future; no prefetch."""
    perfect_prefetch: float
    """The same victims; besides, what the next gates need is prefetched, nearest gate first."""
    clairvoyant: float
    """The better of the two."""
    lower_bound: float
    """max(compute, fewest loads x load time): no schedule gets below."""
    fewest_loads: float
    """Loads per token that no schedule gets below."""


class TraceSimulator:
    """One trace, any number of runs. Runs release the GIL and may go on in several threads."""

    def __init__(self, trace: RoutingTrace) -> None:
        self._trace = trace
        self._view = _native.TraceView(
            trace.num_experts,
            trace.expert_ids,
            trace.weights,
            trace.probs,
            trace.spec_probs,
            trace.embeddings,
            trace.token_ids,
            trace.phase,
        )
        self._lessons: dict[tuple[object, ...], _Lesson] = {}

    @property
    def trace(self) -> RoutingTrace:
        return self._trace

    def run(
        self,
        policy: str,
        measured: Sequences,
        *,
        slots: int,
        load_ratio: float,
        learned: Sequences = (),
        batch: int = 1,
        eviction: str = "policy",
        prefetch_distance: int = 3,
        store_capacity: int = 1000,
        prediction_delay: float = 0.0,
        prefetch_depth: int = 1,
        policy_object: Policy | None = None,
        predictor_object: Predictor | None = None,
    ) -> Simulation:
        """Shows `learned` to the policy's predictor, then plays `measured` on an empty cache.

        load_ratio: load time of one expert / compute time of one layer. batch: sequences that
        advance together. eviction: "policy" is the policy's own. prediction_delay: from an
        observation to the prediction made of it. prefetch_depth: prefetches handed to the link at
        once. `policy_object` replaces the named policy and
        `predictor_object` is then what it listens to; either serves one run.
        Runs that differ in neither policy, distance, capacity nor `learned` share what a predictor
        that can be copied learnt of `learned`; learn_s is then that of the first.
        Raises ConfigError for an unknown policy or a value that does not fit.
        """
        if not measured:
            raise ConfigError("no sequence to measure; give a trace with more or a smaller split")
        if predictor_object is not None and policy_object is None:
            raise ConfigError("predictor_object needs the policy_object that listens to it")

        def prepare(predictor: Predictor | None) -> _native.Simulator:
            try:
                return _native.Simulator(
                    self._view,
                    policy,
                    slots,
                    load_ratio,
                    batch=batch,
                    eviction=eviction,
                    prefetch_distance=prefetch_distance,
                    store_capacity=store_capacity,
                    prediction_delay=prediction_delay,
                    prefetch_depth=prefetch_depth,
                    own_policy=policy_object,
                    own_predictor=predictor,
                )
            except ValueError as error:
                raise ConfigError(str(error)) from error

        simulator = prepare(predictor_object)
        if policy_object is None and learned:
            key = (policy, tuple(learned), prefetch_distance, store_capacity)
            lesson = self._lessons.setdefault(key, _Lesson(tuple(learned)))
            taught = lesson.take(simulator)
            simulator = simulator if taught is None else prepare(taught)
            learn_s = lesson.learn_s
        else:
            learn_s = _warm_up(simulator, learned)
        begin = time.perf_counter()
        ends = [0.0]
        for together in [[sequence] for sequence in measured] if batch == 1 else [list(measured)]:
            simulator.run(together)
            ends.append(simulator.result().time)
        simulator.check_integrity()
        return _simulation(
            simulator.result(),
            request_times=tuple(b - a for a, b in pairwise(ends)) if batch == 1 else (),
            learn_s=learn_s,
            run_s=time.perf_counter() - begin,
        )

    def teach(self, predictor: Predictor, sequences: Sequences) -> None:
        """Shows the sequences to a predictor, as `run` does with those it learns from."""
        num_slots = self._trace.num_layers * self._trace.num_experts
        simulator = _native.Simulator(self._view, "lru", num_slots, 0.0, own_predictor=predictor)
        simulator.warm_up(list(sequences))

    def bounds(
        self, measured: Sequences, *, slots: int, load_ratio: float, batch: int = 1
    ) -> Bounds:
        """Of the same run. Raises ConfigError for a value that does not fit."""
        try:
            bounds = _native.clairvoyant_bounds(
                self._view, list(measured), slots, load_ratio, batch
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return Bounds(
            belady=bounds.belady / bounds.num_tokens,
            perfect_prefetch=bounds.perfect_prefetch / bounds.num_tokens,
            clairvoyant=bounds.clairvoyant / bounds.num_tokens,
            lower_bound=bounds.lower_bound / bounds.num_tokens,
            fewest_loads=bounds.fewest_loads / bounds.num_tokens,
        )


class _Lesson:
    """What a predictor learns of some sequences, learnt once and handed out in copies."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._lock = threading.Lock()
        self._taught: Predictor | None = None
        self.learn_s = 0.0

    def take(self, simulator: _native.Simulator) -> Predictor | None:
        """A taught predictor; or None, and the simulator's own was taught. Blocks while another
        thread teaches.
        """
        if not simulator.can_clone_predictor:
            self.learn_s = _warm_up(simulator, self._sequences)
            return None
        with self._lock:
            if self._taught is None:
                self.learn_s = _warm_up(simulator, self._sequences)
                self._taught = simulator.clone_predictor()
                return None
            return self._taught.clone()


def _warm_up(simulator: _native.Simulator, sequences: Sequences) -> float:
    """Returns the seconds it took."""
    begin = time.perf_counter()
    for sequence in sequences:  # one by one, so that an interrupt is heard in between
        simulator.warm_up([sequence])
    return time.perf_counter() - begin


def _simulation(
    result: _native.SimulationResult,
    *,
    request_times: tuple[float, ...],
    learn_s: float,
    run_s: float,
) -> Simulation:
    return Simulation(
        num_steps=result.num_steps,
        num_tokens=result.num_tokens,
        time=result.time,
        compute=result.compute,
        stall=result.stall,
        decode_tokens=result.decode_tokens,
        decode_time=result.decode_time,
        request_times=request_times,
        hits=result.hits,
        late=result.late,
        misses=result.misses,
        on_demand_loads=result.on_demand_loads,
        prefetch_loads=result.prefetch_loads,
        prefetches_used=result.prefetches_used,
        prefetches_wasted=result.prefetches_wasted,
        prefetches_cancelled=result.prefetches_cancelled,
        evictions=result.evictions,
        recall={
            distance: Recall(
                top_k=count.within_top_k / count.chosen, top_2k=count.within_top_2k / count.chosen
            )
            for distance, count in enumerate(result.recall, start=1)
            if count.chosen
        },
        learn_s=learn_s,
        run_s=run_s,
    )
