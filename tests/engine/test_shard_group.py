from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from fmoe_ray.engine.shard_group import Alone, own_experts, own_experts_of_layer


@dataclass
class Member(Alone):
    rank: int
    size: int


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 20))
def test_expert_l_times_j_lies_on_the_shard_of_its_remainder(
    size: int, num_layers: int, num_experts: int
) -> None:
    for rank in range(size):
        group = Member(rank, size)
        everywhere = range(num_layers * num_experts)
        expected = [e for e in everywhere if e % size == rank]
        assert list(own_experts(group, len(everywhere))) == expected
        assert expected == [
            layer * num_experts + expert
            for layer in range(num_layers)
            for expert in own_experts_of_layer(group, layer, num_experts)
        ]
