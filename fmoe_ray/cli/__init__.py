"""The `fmoe` command: composition root, one module a command. Each imports what it needs when it runs."""

from fmoe_ray.cli.app import main

__all__ = ["main"]
