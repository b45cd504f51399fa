"""Collects the commands and turns errors of this package into one line and exit code 2."""

import sys

import typer

from fmoe_ray import __version__
from fmoe_ray.cli import bench, evaluate, store
from fmoe_ray.errors import FmoeError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve Mixture-of-Experts models larger than GPU memory.",
)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="evaluate")
app.add_typer(store.app, name="store")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    try:
        app()
    except FmoeError as error:
        print(f"fmoe: {error}", file=sys.stderr)
        sys.exit(2)
