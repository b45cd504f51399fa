"""Asks the cluster's autoscaler whether any node type could ever hold a placement group."""

import logging
import time
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 15.0
_ROUNDS = 2
"""Of the autoscaler, begun after the question was put."""


def can_ever_hold(bundles: list[dict[str, float]], strategy: str) -> bool:
    """Puts up a group like it for a few seconds: the nodes that this starts are needed anyway.

    True also where nobody answers within `ANSWER_TIMEOUT_S`: an autoscaler of the first version, or
    a cluster that somebody else scales.
    """
    group = placement_group(bundles, strategy=strategy)
    try:
        return _is_in_reach(group)
    finally:
        remove_placement_group(group)


def _is_in_reach(group: PlacementGroup) -> bool:
    first_round = _state().autoscaler_state_version
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        if group.wait(timeout_seconds=0.5):
            return True
        state = _state()
        refused = (gang.details for gang in state.infeasible_gang_resource_requests)
        if any(details.startswith(group.id.hex()) for details in refused):
            return False
        if state.autoscaler_state_version >= first_round + _ROUNDS:
            return True
    logger.warning("no autoscaler has answered; the application waits for nodes as it is")
    return True


def _state() -> Any:
    status = ray._private.worker.global_worker.gcs_client.get_cluster_status()
    return autoscaler_pb2.GetClusterStatusReply.FromString(status).autoscaling_state
