"""`fmoe validate`: checks configuration files without a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from fmoe_ray.cli.app import app


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(help="Serve, `ray up` and RayService files.")],
) -> None:
    """Check configuration files: schema, unknown keys, settings of the application."""
    from fmoe_ray.actors.config_files import find_mistakes

    num_wrong = 0
    for file in files:
        mistakes = find_mistakes(file)
        num_wrong += bool(mistakes)
        for mistake in mistakes:
            typer.echo(f"{file}: {mistake}", err=True)
        if not mistakes:
            typer.echo(f"{file}: ok")
    if num_wrong:
        raise typer.Exit(2)
