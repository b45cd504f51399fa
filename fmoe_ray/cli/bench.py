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


@app.command()
def engine(
    model: Annotated[
        str | None, typer.Option("--model", help="A checkpoint folder or hub name, or tiny.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights of a real model's sizes: mixtral-8x7b, qwen1.5-moe, phi-3.5-moe, "
            "qwen3-30b-a3b or gpt-oss-20b."
        ),
    ] = None,
    budget: Annotated[list[str], typer.Option(help="Repeat to compare.")] = ["0.5"],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="Repeat to compare.")] = ["lru"],  # noqa: B006
    routing: Annotated[
        str, typer.Option(help="model, uniform, or a recorded trace (npz) of this geometry.")
    ] = "model",
    batch: Annotated[list[int], typer.Option(min=1, help="Repeat to compare.")] = [1],  # noqa: B006
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of a prompt.")] = 512,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps timed.")] = 48,
    peers: Annotated[
        bool, typer.Option(help="Time transformers and accelerate in the same run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Time to first token and per token of the engine, beside what the hardware allows."""
    import msgspec
    import torch

    from fmoe_ray.engine.gpu.assemble import prepare_process
    from fmoe_ray.errors import ConfigError
    from fmoe_ray.evaluate import engine_bench, engine_peers
    from fmoe_ray.evaluate.shapes import make_model
    from fmoe_ray.models.device import choose_device, choose_dtype
    from fmoe_ray.models.loader import load_model

    if (model is None) == (shape is None):
        raise ConfigError("give either --model PATH or --shape NAME")
    prepare_process()
    device = choose_device("auto")
    if shape is not None:
        loaded = make_model(shape, device, torch.bfloat16)
    else:
        assert model is not None
        loaded = load_model(model, device=device, dtype=choose_dtype("auto", device))
    name = shape or str(model)
    loads = [
        engine_bench.Load(
            budget=b, policy=p, routing=routing, batch=rows, prompt_tokens=prompt, steps=steps
        )
        for rows in batch
        for b in budget
        for p in policy
    ]
    reports = engine_bench.run(loaded, name, loads, engine_bench.measure_ceilings(device))
    if peers:
        reports = engine_peers.beside(loaded, reports)
    for report in reports:
        if as_json:
            typer.echo(msgspec.json.encode(report).decode())
            continue
        typer.echo(
            f"{report.model} budget {report.budget} {report.policy} batch {report.batch}: TTFT "
            f"{report.ttft_ms:.1f} ms ({report.ttft_over_limit:.2f}x its limit), TPOT "
            f"{report.tpot_ms_p50:.2f} ms (p99 {report.tpot_ms_p99:.2f}), "
            f"{report.tokens_per_s:.0f} tokens/s, hits {report.hit_rate:.0%}, stall "
            f"{report.stall_ms:.2f} ms; {report.tpot_over_serial:.2f}x the serial limit "
            f"{report.serial_limit_ms:.2f} ms, {report.tpot_over_overlapped:.2f}x the overlapped "
            f"{report.overlapped_limit_ms:.2f} ms; resident {report.resident_step_ms:.2f} ms, "
            f"{report.resident_over_roofline:.2f}x its roofline; link {report.link_gbps:.1f} GB/s"
        )
        for peer, milliseconds in report.peers.items():
            typer.echo(f"  {peer}: {milliseconds:.1f} ms a token")
