"""Client and AsyncClient: one way to ask, over HTTP, over Ray or from inside a cluster."""

from fmoe_ray.client.answers import Answer, Piece
from fmoe_ray.client.clients import AsyncClient, Client

__all__ = ["Answer", "AsyncClient", "Client", "Piece"]
