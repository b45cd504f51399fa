"""Policies: which exist, how one is made, and how one is written in Python for an experiment.

The decisions run in the compiled core, so that engine and simulator run the same objects.
"""

from fmoe_ray.policy.planner import Planner
from fmoe_ray.policy.plugin import Policy, Predictor, plugin_policy
from fmoe_ray.policy.table import (
    ExpertCache,
    GateRequested,
    Geometry,
    Instruction,
    IterationStarted,
    PolicyInfo,
    PolicyParts,
    Prediction,
    VictimNeeded,
    list_policies,
    make_policy,
)

__all__ = [
    "ExpertCache",
    "GateRequested",
    "Geometry",
    "Instruction",
    "IterationStarted",
    "Planner",
    "Policy",
    "PolicyInfo",
    "PolicyParts",
    "Prediction",
    "Predictor",
    "VictimNeeded",
    "list_policies",
    "make_policy",
    "plugin_policy",
]
