"""`fmoe store`: expert-map files, and the map store that runs in a cluster."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look into, merge and prune expert-map files.")

_LOCK_TIMEOUT_S = 60.0
_Files = Annotated[list[Path], typer.Argument(help="Expert-map files of one model, in order.")]


@app.command()
def info(files: _Files) -> None:
    """Print what each file is of. Reads the header alone."""
    from dataclasses import asdict

    from fmoe_ray.maps.store_file import read_header

    for file in files:
        header = read_header(file)
        typer.echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
        for name, value in asdict(header).items():
            typer.echo(f"  {name}: {value}")


@app.command()
def merge(
    files: _Files,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the result goes.")],
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="Maps it holds; the largest of the files' if not given."),
    ] = None,
) -> None:
    """Join files; where they do not all fit, the most redundant maps are replaced."""
    from fmoe_ray.maps import MapStore
    from fmoe_ray.maps.file_lock import lock_beside
    from fmoe_ray.maps.store_file import read_header

    for file in files:  # before anything is made where there is no such file
        read_header(file)
    with lock_beside(output, timeout_s=_LOCK_TIMEOUT_S):  # it may be one of the files
        capacity = capacity or max(read_header(file).capacity for file in files)
        first, *others = files
        result = MapStore.load(first).copy(capacity=capacity)
        for file in others:
            result.merge(MapStore.load(file, like=result))
        result.save(output)
    typer.echo(f"{output}: {len(result)} maps of {len(files)} files")


@app.command()
def prune(
    file: Annotated[Path, typer.Argument(help="An expert-map file.")],
    capacity: Annotated[int, typer.Option(min=1, help="Maps to keep.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the result goes; the file itself if not given."),
    ] = None,
) -> None:
    """Keep so many maps, dropping the most redundant."""
    from fmoe_ray.maps import MapStore
    from fmoe_ray.maps.file_lock import lock_beside
    from fmoe_ray.maps.store_file import read_header

    read_header(file)  # as above
    with lock_beside(output or file, timeout_s=_LOCK_TIMEOUT_S):
        store = MapStore.load(file)
        result = store.copy(capacity=capacity)
        result.save(output or file)
    typer.echo(f"{output or file}: {len(result)} of {len(store)} maps")


_Model = Annotated[str, typer.Argument(help="The served name of the model.")]
_Address = Annotated[str, typer.Option(help="Of the cluster, as ray.init takes it.")]


@app.command()
def status(model: _Model, address: _Address = "auto") -> None:
    """Print what the map store of a cluster holds, and how far each replica has read."""
    from dataclasses import asdict

    from fmoe_ray.actors.map_link import RemoteMapStore, connected

    with connected(address):
        for name, value in asdict(RemoteMapStore.get(model).info()).items():
            typer.echo(f"{name}: {value}")


@app.command()
def stop(model: _Model, address: _Address = "auto") -> None:
    """Save and end the map store of a cluster; the next replica starts a new one.

    It outlives all replicas, so that is how a changed model or capacity takes effect.
    """
    from fmoe_ray.actors.map_link import RemoteMapStore, connected

    with connected(address):
        RemoteMapStore.get(model).stop()
