"""`fmoe bench`: measures a part alone, on this machine."""

import json
from dataclasses import asdict
from pathlib import Path
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


@app.command()
def stream(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    streams: Annotated[int, typer.Option(min=1, help="Answers streamed at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 2000,
) -> None:
    """Tokens a second through scheduler and HTTP, from a stub instead of a model."""
    from fmoe_ray.evaluate.stream_bench import bench_stream

    report = bench_stream(num_streams=streams, tokens_per_stream=tokens)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "tokens_per_s": report.tokens_per_s}))
        return
    typer.echo(
        f"{report.num_streams} streams, {report.num_tokens} tokens in {report.num_chunks} events, "
        f"{report.seconds:.2f} s: {report.tokens_per_s:.0f} tokens/s"
    )
    typer.echo(
        f"server: {report.server_us_per_token:.1f} us of processor time a token; "
        f"first token after {report.first_token_ms:.1f} ms (median)"
    )


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Checkpoint: tiny, a folder or a hub name.")] = "tiny",
    batch: Annotated[list[int] | None, typer.Option(help="Rows a step; may be repeated.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of each row.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps timed.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Time of a decode step with every expert resident, beside transformers' own forward."""
    from fmoe_ray.evaluate.step_bench import measure_steps

    measured = [
        measure_steps(model, batch_size=size, context=context, steps=steps, num_threads=threads)
        for size in batch or [1, 4, 16]
    ]
    if as_json:
        typer.echo(json.dumps({"steps": [asdict(times) for times in measured]}))
        return
    for times in measured:
        compared = ", ".join(
            f"{name} {times.transformers_ms[name]:.2f} ms (ratio {ratio:.2f})"
            for name, ratio in times.ratio.items()
        )
        typer.echo(f"batch {times.batch_size:>3}: {times.step_ms:.2f} ms a step; {compared}")


@app.command()
def families(
    write: Annotated[
        str | None, typer.Option(help="Write the table into this file, such as docs/families.md.")
    ] = None,
) -> None:
    """Which model families load and run: a tiny random model of each, beside transformers'."""
    from fmoe_ray.evaluate.families import survey, table

    text = table(survey())
    if write is None:
        typer.echo(text)
    else:
        Path(write).write_text(text, encoding="utf-8")
