"""`fmoe bench`: measures a part alone, on this machine."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure a part alone, on this machine.")


@app.command()
def matcher(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations timed per store.")] = 8,
) -> None:
    """Time of the trajectory search a layer and request, and memory of 32K maps."""
    from fmoe_ray.evaluate.matcher_bench import DEFAULT_CASES, bench_matcher, store_memory

    timings = [bench_matcher(case, iterations=iterations) for case in DEFAULT_CASES]
    memory = store_memory()
    if as_json:
        report = {
            "timings": [{**asdict(timing), "speedup": timing.speedup} for timing in timings],
            "memory": [asdict(row) for row in memory],
        }
        typer.echo(json.dumps(report))
        return
    for timing in timings:
        case = timing.case
        compared = f"top {case.num_columns}" if case.num_columns else "all"
        typer.echo(
            f"{case.capacity:>6} maps, {compared} of {case.num_experts} experts: "
            f"{timing.native_us:.1f} us a layer, NumPy {timing.numpy_us:.0f} us "
            f"({timing.speedup:.0f}x)"
        )
    for row in memory:
        typer.echo(
            f"{row.num_maps:>6} maps of {row.model}: {row.map_bytes / 1e6:.0f} MB, "
            f"embeddings {row.embedding_bytes / 1e6:.0f} MB"
        )
