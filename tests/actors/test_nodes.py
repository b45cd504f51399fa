"""Clusters of several nodes, with a stub for a model: nodes that die, nodes that come and go."""

import multiprocessing
from collections.abc import Callable

import pytest
from clusters.followed_load import follow_the_load
from clusters.killed_node import kill_a_node

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LIMIT_S = 500.0


def in_own_process(scenario: Callable[[], None]) -> None:
    """Ray is a global of its process, and the other tests have theirs."""
    process = multiprocessing.get_context("spawn").Process(target=scenario)
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, process.exitcode


def test_a_replica_moves_to_another_node_when_its_own_dies() -> None:
    in_own_process(kill_a_node)


def test_gpu_nodes_follow_the_load() -> None:
    """0 nodes, 1 for the first replica, 3 under load, 1 again when idle."""
    in_own_process(follow_the_load)
