"""The `fmoe` command: composition root, one module a command, heavy imports inside."""

from fmoe_ray.cli.app import main

__all__ = ["main"]
