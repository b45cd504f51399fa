"""`fmoe bench`: measures a part alone, on this machine."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmoe_ray.cli.progress import status_line

if TYPE_CHECKING:
    from fmoe_ray.evaluate.policy_bench import PolicyResult

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
def store(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    capacity: Annotated[
        list[int] | None, typer.Option(min=1, help="Maps stored; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Maps that come together.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds timed per store.")] = 7,
) -> None:
    """Time a full map store takes to place a new map, together with others and alone."""
    from fmoe_ray.evaluate.store_bench import CASES, bench_store, measure_machine

    machine = measure_machine()
    timings = [
        bench_store(replace(case, capacity=size, batch=batch), machine, rounds=rounds)
        for case in CASES
        for size in capacity or [1_000, 16_000]
    ]
    if as_json:
        report = {
            "machine": asdict(machine),
            "timings": [
                {**asdict(t), "speedup": t.speedup, "over_limit": t.over_limit} for t in timings
            ],
        }
        typer.echo(json.dumps(report))
        return
    typer.echo(f"one core: {machine.gflops:.0f} GFLOP/s, reads {machine.read_gbps:.1f} GB/s")
    for timing in timings:
        case = timing.case
        typer.echo(
            f"{case.capacity:>6} maps of {case.model}: {timing.together_ms:.2f} ms a map of "
            f"{case.batch}, alone {timing.alone_ms:.2f} ms ({timing.speedup:.1f}x), bare product "
            f"{timing.product_ms:.2f} ms; limits: compute {timing.compute_limit_ms:.2f} ms, memory "
            f"{timing.memory_limit_ms:.2f} ms ({timing.over_limit:.1f}x the larger)"
        )


@app.command()
def channel(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    shards: Annotated[
        list[int] | None, typer.Option(min=1, help="Shards; may be repeated.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows a step.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps timed.")] = 2000,
) -> None:
    """Time a step spends between replica and shards, beside the same over gloo."""
    from fmoe_ray.actors.channel_bench import bench_channel, bench_gloo

    measured = []
    for number in shards or [1, 2]:
        measured.append(bench_channel(num_shards=number, num_rows=rows, num_steps=steps))
        measured.append(bench_gloo(num_shards=number, num_steps=steps))
    if as_json:
        typer.echo(json.dumps({"steps": [asdict(times) for times in measured]}))
        return
    for times in measured:
        typer.echo(
            f"{times.num_shards} shards, {times.transport:>4}: {times.median_us:.0f} us a step "
            f"(10 to 90%: {times.p10_us:.0f} to {times.p90_us:.0f})"
        )


@app.command()
def stream(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    streams: Annotated[int, typer.Option(min=1, help="Answers streamed at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 2000,
    interval: Annotated[
        float | None, typer.Option(min=0, help="server.stream_interval_ms; 0: tokens alone.")
    ] = None,
    through_serve: Annotated[
        bool, typer.Option("--serve", help="Through Ray Serve's proxy, on a cluster of its own.")
    ] = False,
) -> None:
    """Tokens a second through scheduler and HTTP, from a stub instead of a model."""
    from fmoe_ray.config import ServerSettings
    from fmoe_ray.evaluate.stream_bench import bench_stream, bench_url

    settings = ServerSettings() if interval is None else ServerSettings(stream_interval_ms=interval)
    if through_serve:
        from fmoe_ray.actors.stub_app import stub_app

        with stub_app(streams, settings) as url:
            report = bench_url(url, num_streams=streams, tokens_per_stream=tokens)
    else:
        report = bench_stream(num_streams=streams, tokens_per_stream=tokens, settings=settings)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "tokens_per_s": report.tokens_per_s}))
        return
    typer.echo(
        f"{report.num_streams} streams, {report.num_tokens} tokens in {report.num_chunks} events, "
        f"{report.seconds:.2f} s: {report.tokens_per_s:.0f} tokens/s"
    )
    typer.echo(f"first token after {report.first_token_ms:.1f} ms (median)")
    if report.server_us_per_token is not None:
        typer.echo(f"server: {report.server_us_per_token:.1f} us of processor time a token")


@app.command()
def policies(
    config: Annotated[Path, typer.Option(help="A Serve file; its first application's args.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="Repeat to compare; all if not given.")
    ] = None,
    seen: Annotated[int, typer.Option(min=0, help="Dialogues that teach the policies.")] = 300,
    held_out: Annotated[int, typer.Option(min=1, help="Dialogues measured.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 16,
    load_ratio: Annotated[
        float, typer.Option(min=0.01, help="Load time of an expert / compute time of a layer.")
    ] = 0.5,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Every policy in the engine, on a CPU with a slow link: tokens, hits, stall and time a token.

    The link is throttled in proportion to a layer's compute time, which is measured first.
    """
    from fmoe_ray.config import load_settings
    from fmoe_ray.evaluate.policy_bench import bench_policies

    with status_line() as update:
        report = bench_policies(
            load_settings(config),
            seen=seen,
            held_out=held_out,
            max_tokens=max_tokens,
            policies=policy or (),
            load_ratio=load_ratio,
            on_progress=update,
        )
    if as_json:
        typer.echo(json.dumps({"settings": asdict(report.conditions), **_listed(report.policies)}))
        return
    conditions = report.conditions
    typer.echo(
        f"{conditions.held_out} dialogues after {conditions.seen} seen, budget "
        f"{conditions.budget}; a layer computes in {conditions.layer_ms:.3f} ms, an expert loads "
        f"in {conditions.load_ms:.3f} ms ({conditions.link_gbps:.3g} GB/s)"
    )
    headings = f"{'hits':>8}{'late':>8}{'stall ms':>10}{'TPOT ms':>10}{'TTFT ms':>10}"
    typer.echo(f"{'policy':<20}{headings}  tokens")
    for row in report.policies:
        typer.echo(
            f"{row.policy:<20}{row.hit_rate:>8.1%}{row.late_rate:>8.1%}{row.stall_ms:>10.2f}"
            f"{row.tpot_ms:>10.2f}{row.ttft_ms:>10.2f}  {row.tokens_sha256[:12]}"
        )


def _listed(policies: "list[PolicyResult]") -> dict[str, Any]:
    return {"policies": [asdict(result) for result in policies]}


@app.command()
def agreement(
    config: Annotated[
        Path | None, typer.Option(help="A Serve file that names the model; tiny if not given.")
    ] = None,
    load_ms: Annotated[float, typer.Option(min=0.1, help="Time to load one expert.")] = 5.0,
    seen: Annotated[int, typer.Option(min=0, help="Dialogues that teach the policies.")] = 100,
    held_out: Annotated[int, typer.Option(min=1, help="Dialogues compared.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 16,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """The simulator's time per token beside the engine's, on a CPU with a slow link."""
    from fmoe_ray.config import EngineSettings, Settings, load_settings
    from fmoe_ray.evaluate.agreement_bench import bench_agreement

    settings = Settings(engine=EngineSettings(num_threads=1))
    with status_line() as update:
        rows = bench_agreement(
            settings if config is None else load_settings(config),
            load_ms=load_ms,
            seen=seen,
            held_out=held_out,
            max_tokens=max_tokens,
            on_progress=update,
        )
    if as_json:
        report = [{**asdict(row), "ratio": row.ratio} for row in rows]
        typer.echo(json.dumps({"agreements": report}))
        return
    for row in rows:
        typer.echo(
            f"{row.policy:<8} budget {row.budget:g}: simulated {row.simulated_tpot_ms:.2f} ms a "
            f"token, measured {row.measured_tpot_ms:.2f} (ratio {row.ratio:.3f}); hits "
            f"{row.simulated_hit_rate:.1%} and {row.measured_hit_rate:.1%}; a layer "
            f"{row.layer_ms:.3f} ms ({row.resident_layer_ms:.3f} resident), "
            f"a load {row.load_ms:.3f} ms ({row.nominal_load_ms:g} nominal)"
        )


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Checkpoint: tiny, a folder or a hub name.")] = "tiny",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows a step; may be repeated.")
    ] = None,
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
    from fmoe_ray.errors import ConfigError
    from fmoe_ray.evaluate.families import survey, table

    if write is not None and not Path(write).parent.is_dir():  # before the work, not after it
        raise ConfigError(f"--write {write}: {Path(write).parent} is no folder; make it first")
    text = table(survey())
    if write is None:
        typer.echo(text)
        return
    try:
        Path(write).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {write}: cannot be written: {error.strerror}") from error


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

    from fmoe_ray.config import Budget
    from fmoe_ray.engine.gpu.assemble import prepare_process
    from fmoe_ray.errors import ConfigError
    from fmoe_ray.evaluate import engine_bench, engine_peers
    from fmoe_ray.evaluate.shapes import make_model
    from fmoe_ray.models.device import choose_device, choose_dtype
    from fmoe_ray.models.loader import load_model

    if (model is None) == (shape is None):
        raise ConfigError("give either --model PATH or --shape NAME")
    for text in budget:
        Budget.parse(text)  # before the work, not after it
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
    measured = engine_bench.run(loaded, name, loads, engine_bench.measure_ceilings(device))
    for report in engine_peers.beside(loaded, list(measured)) if peers else measured:
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
