"""Cache and policy joined, driven event by event: for experiments, tests and understanding.

The engine drives the same planner in native code.
"""

from fmoe_ray import _native
from fmoe_ray._native import GateOutcome, Geometry, LinkCommand, Policy

__all__ = ["GateOutcome", "LinkCommand", "Planner"]


class Planner(_native.Planner):
    """Serves misses ahead of everything and applies what the policy orders.

    The policy must serve no other planner. Raises ValueError for slots that do not fit. Not
    thread-safe.

        parts = make_policy("fmoe", geometry=geometry, num_slots=8)
        planner = Planner(geometry, 8, parts.policy)
        planner.start_iteration(1)
        planner.request_gate(0, [1, 5])
        [command.expert for command in planner.take_commands()]
    """

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        policy: Policy,
        *,
        prefetch_depth: int = 1,
    ) -> None:
        super().__init__(geometry, num_slots, policy, prefetch_depth)

    def start_iteration(
        self,
        iteration: int,
        *,
        num_rows: int = 1,
        has_prefill: bool = False,
        layer_time: float = 1.0,
        load_time: float = 1.0,
    ) -> None:
        """Times in any one unit."""
        self.iteration_started(iteration, num_rows, has_prefill, layer_time, load_time)

    def request_gate(self, layer: int, experts: list[int], *, backlog: float = 0.0) -> GateOutcome:
        """`experts` of this layer, 0..J-1; the planner sorts and indexes them."""
        num_experts = self.cache.geometry.num_experts
        needed = sorted({layer * num_experts + expert for expert in experts})
        return self.gate_requested(layer, needed, backlog)
