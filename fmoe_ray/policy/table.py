"""The table of policies, and the types that pass between planner, policy and predictor.

`Policy` and `Predictor` are base classes too: a subclass written in Python goes wherever a native
one does. The core takes the GIL for every call of it: right for experiments, slow in the engine.
"""

from fmoe_ray import _native
from fmoe_ray._native import (
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
    prefetch_threshold,
    select_prefetch,
)
from fmoe_ray.errors import ConfigError

__all__ = [
    "Cause",
    "ExpertCache",
    "GateObservation",
    "GateRequested",
    "Geometry",
    "Instruction",
    "IterationContext",
    "IterationStarted",
    "Policy",
    "PolicyInfo",
    "PolicyParts",
    "Prediction",
    "Predictor",
    "VictimNeeded",
    "find_policy",
    "list_policies",
    "make_policy",
    "prefetch_threshold",
    "select_prefetch",
]


def list_policies() -> list[PolicyInfo]:
    """Every policy: its name, one line on what it does, and which predictor it listens to."""
    return _native.describe_policies()


def find_policy(name: str) -> PolicyInfo:
    """Raises ConfigError naming all policies for an unknown one."""
    for info in list_policies():
        if info.name == name:
            return info
    known = ", ".join(info.name for info in list_policies())
    raise ConfigError(f"policy {name!r} is unknown; choose one of {known}")


def make_policy(
    name: str,
    *,
    geometry: Geometry,
    num_slots: int,
    prefetch_distance: int = 3,
    store_capacity: int = 1000,
    embedding_size: int = 0,
    eviction: str = "policy",
    shard: int = 0,
    num_shards: int = 1,
) -> PolicyParts:
    """A policy of the table with its predictor. `eviction` overrides its own choice of victims.

    Raises ConfigError for an unknown name or a parameter that does not fit.
    """
    try:
        return _native.make_policy(
            name,
            geometry=geometry,
            num_slots=num_slots,
            prefetch_distance=prefetch_distance,
            store_capacity=store_capacity,
            embedding_size=embedding_size,
            eviction=eviction,
            shard=shard,
            num_shards=num_shards,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
