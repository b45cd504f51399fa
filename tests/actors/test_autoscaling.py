"""How many replicas for which load: the decision alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ray.actors.autoscaling import ReplicaLoad, TokenLoadPolicy
from fmoe_ray.errors import ConfigError

POLICY = TokenLoadPolicy(target_tokens=1000, tolerated_stall=0.5)
loads = st.lists(
    st.builds(ReplicaLoad, tokens_in_flight=st.floats(0, 1e6), stall_share=st.floats(0, 1)),
    max_size=5,
)


def wanted(*tokens: float, stall: float = 0.0, running: float = 1, queued: float = 0) -> int:
    replicas = [ReplicaLoad(tokens_in_flight=t, stall_share=stall) for t in tokens]
    return POLICY.wanted_replicas(replicas, num_running=running, num_queued=queued)


def test_replicas_share_the_tokens_in_flight_at_the_target() -> None:
    assert wanted(999) == 1
    assert wanted(1001) == 2
    assert wanted(1500, 1400) == 3
    assert wanted(100, 100, 100) == 1


def test_queued_requests_count_as_those_that_run() -> None:
    assert wanted(1000, running=4, queued=8) == 3


def test_a_first_request_wants_a_replica_and_none_wants_none() -> None:
    assert wanted(running=0, queued=1) == 1
    assert wanted(0, running=0) == 0


def test_stall_beyond_the_tolerated_asks_for_more() -> None:
    assert wanted(900, stall=0.5) == 1
    assert wanted(900, stall=0.75) == 2
    assert wanted(900, stall=1.0) == 2


def test_the_stall_of_an_idle_replica_says_nothing() -> None:
    replicas = [
        ReplicaLoad(tokens_in_flight=900, stall_share=0.0),
        ReplicaLoad(tokens_in_flight=0, stall_share=1.0),
    ]
    assert POLICY.wanted_replicas(replicas, num_running=1, num_queued=0) == 1


@given(loads, st.integers(0, 100), st.integers(0, 100), st.floats(0, 1e3))
def test_more_tokens_never_want_fewer_replicas(
    replicas: list[ReplicaLoad], running: int, queued: int, more: float
) -> None:
    before = POLICY.wanted_replicas(replicas, num_running=running, num_queued=queued)
    busier = [
        ReplicaLoad(tokens_in_flight=r.tokens_in_flight * (1 + more), stall_share=r.stall_share)
        for r in replicas
    ]
    assert POLICY.wanted_replicas(busier, num_running=running, num_queued=queued) >= before >= 0


def test_what_replicas_record_reaches_the_decision() -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={
            "fmoe_tokens_in_flight": {"a": 1200.0, "b": 900.0, "new": 50.0},
            "fmoe_stall_share": {"a": 0.2, "b": 0.1},
        },
        total_num_requests=3.0,
        total_queued_requests=0.0,
        target_num_replicas=2,
    )
    assert POLICY(context) == (3, {})


def test_silence_is_no_reason_to_change() -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={},
        total_num_requests=3.0,
        total_queued_requests=0.0,
        target_num_replicas=2,
    )
    assert POLICY(context) == (2, {})
    context.total_num_requests = 0.0
    assert POLICY(context) == (0, {})


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="target_tokens 0"):
        TokenLoadPolicy(target_tokens=0)
    with pytest.raises(ConfigError, match=r"tolerated_stall 1\.5"):
        TokenLoadPolicy(target_tokens=1, tolerated_stall=1.5)
