"""A shard's place in its replica, and where the shards meet. Knows no torch."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    rank: int = 0
    num_shards: int = 1
    host: str = ""
    """Of rank 0, as the other shards reach it."""
    port: int = 0
    listener: socket.socket | None = None
    """Of rank 0 alone: already bound to `port`, so that nobody else can take it meanwhile."""


ONLY_SEAT = Seat()
"""Of a replica with one shard."""
