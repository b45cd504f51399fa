"""The `fmoe` command: composition root, one module a command, heavy imports inside."""

from fmoe_ray.cli import simulate as simulate  # importing a command adds it
from fmoe_ray.cli.app import main

__all__ = ["main"]
