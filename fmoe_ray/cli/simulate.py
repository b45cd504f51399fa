"""`fmoe simulate`: how fast policies would serve a recorded routing trace."""

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fmoe_ray.cli.app import app
from fmoe_ray.config import Budget, OffloadSettings
from fmoe_ray.errors import ConfigError

if TYPE_CHECKING:
    from fmoe_ray.evaluate.policy_table import Comparison, Row
    from fmoe_ray.trace.format import RoutingTrace

_DEFAULTS = OffloadSettings()


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="A routing trace (npz).")],
    policy: Annotated[list[str], typer.Option(help="Repeat to compare.")],
    budget: Annotated[
        list[str],
        typer.Option(help="Experts that fit: 0.25 or 25% of all, or a number. Repeatable."),
    ],
    load_ratio: Annotated[
        list[float],
        typer.Option(help="Load time of an expert / compute time of a layer. Repeatable."),
    ],
    capacity: Annotated[
        int, typer.Option(min=1, help="Expert maps that the store keeps.")
    ] = _DEFAULTS.store_capacity,
    split: Annotated[
        float,
        typer.Option(min=0, max=1, help="Part of the sequences to learn from; measures the rest."),
    ] = 0.7,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that advance together.")] = 1,
    distance: Annotated[
        int, typer.Option(min=1, help="How many layers ahead an expert is prefetched.")
    ] = _DEFAULTS.prefetch_distance,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at once, one core each.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write PNG files into this folder (needs matplotlib).")
    ] = None,
) -> None:
    """Simulate policies on a recorded routing trace, beside LRU and what clairvoyance allows.

    Times are per token, in units of one layer's compute.
    """
    from fmoe_ray.evaluate.policy_table import NO_OFFLOAD, Comparison, blind_policies
    from fmoe_ray.trace.format import load_trace

    for ratio in load_ratio:
        if not 0 <= ratio < float("inf"):
            raise ConfigError(f"--load-ratio {ratio}: 0 or more is needed")
    comparison = Comparison(
        policies=policy,
        budgets=[Budget.parse(text) for text in budget],
        load_ratios=load_ratio,
        split=split,
        batch=batch,
        prefetch_distance=distance,
        store_capacity=capacity,
        num_threads=jobs,
    )
    if plot is not None:
        from fmoe_ray.evaluate.plots import require_matplotlib

        require_matplotlib()  # before the work, not after it
    routing = load_trace(trace)
    for name in blind_policies(routing, policy):
        typer.echo(
            f"warning: {name} predicts from speculative gates, and {trace} has no spec_probs: "
            "it prefetches nothing",
            err=True,
        )
    rows = _compare_with_progress(routing, comparison)
    if any(row.policy == NO_OFFLOAD and row.budget < 1 for row in rows):
        typer.echo(
            f"warning: {NO_OFFLOAD} is simulated with every expert resident, whatever the budget; "
            "the engine runs it with budget 100% alone",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps({"results": [row.to_json() for row in rows]}, indent=2))
    else:
        _print_table(rows)
    if plot is not None:
        from fmoe_ray.evaluate.plots import plot_policy_table

        for path in plot_policy_table(rows, plot):
            typer.echo(f"wrote {path}", err=True)


def _compare_with_progress(trace: "RoutingTrace", comparison: "Comparison") -> "list[Row]":
    from rich.console import Console
    from rich.progress import Progress

    from fmoe_ray.evaluate.policy_table import compare, num_simulations

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=num_simulations(comparison))
        return compare(
            trace, comparison, lambda what: progress.update(task, advance=1, description=what)
        )


def _print_table(rows: "list[Row]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for (budget, ratio), cell in groupby(rows, key=lambda row: (row.budget, row.load_ratio)):
        in_cell = list(cell)
        bounds = in_cell[0].bounds
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            title=f"{budget:.3g} of the experts fit, R = {ratio:g}",
            caption=(
                f"LRU {in_cell[0].floor.time_per_token:.2f}, Belady {bounds.belady:.2f}, "
                f"clairvoyant {bounds.clairvoyant:.2f}, lower bound {bounds.lower_bound:.2f}"
            ),
        )
        table.add_column("policy", no_wrap=True)
        for heading in ("time", "gap", "hits", "loads", "wasted", "late", "stall"):
            table.add_column(heading, justify="right")
        for row in in_cell:
            table.add_row(row.policy, *_cells(row))
        console.print(table)
    console.print(
        "Per token; times in units of one layer's compute; gap: closed of LRU's to clairvoyant.",
        style="dim",
    )


def _cells(row: "Row") -> list[str]:
    simulation = row.simulation
    tokens = simulation.num_tokens
    return [
        f"{simulation.time_per_token:.2f}",
        "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
        f"{simulation.hit_rate:.1%}",
        f"{simulation.num_loads / tokens:.2f}",
        f"{simulation.prefetches_wasted / tokens:.2f}",
        f"{simulation.late / tokens:.2f}",
        f"{simulation.stall / tokens:.2f}",
    ]
