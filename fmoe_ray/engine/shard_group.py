"""What a shard knows of the other shards of its replica: its rank, their number, a common sum.

Knows neither Ray nor a transport; `engine.process_group` has the one between processes.
"""

from typing import Protocol

import torch


class ShardGroup(Protocol):
    """All shards of a replica. They make the same calls in the same order, each on one thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, parts: torch.Tensor) -> None:
        """Replaces `parts` by the sum over all shards, bit by bit: wherever one shard has a number,
        all others must have +0. Contiguous; of the same shape and type on all shards.

        Blocks. Raises ShardLostError if a shard does not take part.
        """
        ...

    def close(self) -> None:
        """Idempotent; a sum in progress ends with an error."""


class Alone:
    """The group of a replica with one shard."""

    rank = 0
    size = 1

    def add_up(self, parts: torch.Tensor) -> None:
        """What one shard has is the sum."""

    def close(self) -> None:
        """There is nothing to give up."""


ALONE = Alone()


def own_experts(group: ShardGroup, num_experts: int) -> range:
    """The experts e < num_experts that lie on this shard: e mod G == rank."""
    return range(group.rank, num_experts, group.size)


def own_experts_of_layer(group: ShardGroup, layer: int, num_experts: int) -> range:
    """Numbers j < num_experts within `layer` of the experts e = l * J + j on this shard."""
    return range((group.rank - layer * num_experts) % group.size, num_experts, group.size)
