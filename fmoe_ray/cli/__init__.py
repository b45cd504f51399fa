"""The `fmoe` command: composition root, one module a command, heavy imports inside."""

from fmoe_ray.cli import doctor as doctor  # importing a command adds it
from fmoe_ray.cli import generate as generate
from fmoe_ray.cli import simulate as simulate
from fmoe_ray.cli import validate as validate
from fmoe_ray.cli.app import main

__all__ = ["main"]
