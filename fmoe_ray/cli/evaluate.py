"""`fmoe evaluate`: the paper's evaluation, repeated."""

from pathlib import Path
from typing import Annotated

import typer

from fmoe_ray.cli.progress import status_line
from fmoe_ray.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Repeat the paper's evaluation.")

SMALL_TRACE = Path(__file__).parents[1] / "assets" / "traces" / "gpt-oss-20b-small.npz"


@app.callback()
def _group() -> None:
    """A command alone would lose its name."""


@app.command()
def figures(
    out: Annotated[Path, typer.Option(help="Folder for pictures, tables and index.html.")],
    trace: Annotated[
        Path, typer.Option(help="A routing trace (npz); a small one of GPT-OSS-20B if not given.")
    ] = SMALL_TRACE,
    only: Annotated[
        str, typer.Option(help="Figures by name, such as 9,11,12a,table1; all if not given.")
    ] = "",
) -> None:
    """Draw every figure and table of the paper, each beside the paper's own result.

    What needs full distributions, prompts or a running engine is recorded on the embedded model
    first, and kept in DIR/cache.
    """
    from fmoe_ray.evaluate.figures.catalogue import choose, render
    from fmoe_ray.evaluate.figures.lab import Lab
    from fmoe_ray.evaluate.plots import require_matplotlib

    require_matplotlib()
    names = choose([name for name in only.split(",") if name.strip()])
    cache = out / "cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be made: {error.strerror}") from error
    with status_line() as update:
        paths = render(Lab(cache, trace, on_progress=update), names, out)
    typer.echo(f"wrote {len(paths)} files; open {paths[-1]}")
