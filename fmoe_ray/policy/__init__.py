"""Policies: which exist, how one is made, and how one is written in Python for an experiment.

The decisions run in the compiled core, so that engine and simulator run the same objects.
"""

from fmoe_ray.policy.effect import check_settings, unused_settings
from fmoe_ray.policy.planner import GateOutcome, LinkCommand, Planner
from fmoe_ray.policy.table import (
    Cause,
    ExpertCache,
    GateObservation,
    GateRequested,
    Geometry,
    Instruction,
    IterationContext,
    IterationStarted,
    Policy,
    PolicyInfo,
    PolicyParts,
    Prediction,
    Predictor,
    VictimNeeded,
    find_policy,
    list_policies,
    make_policy,
    prefetch_threshold,
    select_prefetch,
)

__all__ = [
    "Cause",
    "ExpertCache",
    "GateObservation",
    "GateOutcome",
    "GateRequested",
    "Geometry",
    "Instruction",
    "IterationContext",
    "IterationStarted",
    "LinkCommand",
    "Planner",
    "Policy",
    "PolicyInfo",
    "PolicyParts",
    "Prediction",
    "Predictor",
    "VictimNeeded",
    "check_settings",
    "find_policy",
    "list_policies",
    "make_policy",
    "prefetch_threshold",
    "select_prefetch",
    "unused_settings",
]
