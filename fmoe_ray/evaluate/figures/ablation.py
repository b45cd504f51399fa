"""Figure 12: what each part of the paper's method adds (a), and its cache policy (b)."""

import math
from typing import TYPE_CHECKING

from fmoe_ray.evaluate.figures.claims import TIE, in_order, listed, lowest
from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.style import LABELS, draw_bars
from fmoe_ray.evaluate.figures.workload import Workload
from fmoe_ray.evaluate.hardware import MIXTRAL, QWEN, RTX_3090, Clock

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABLATIONS = ("speculate", "hit-count", "map-t", "map-ts", "map-tsd")
EVICTIONS = ("lru", "lfu", "fmoe")
CLOCKS = tuple(Clock(model=model, machine=RTX_3090) for model in (QWEN, MIXTRAL))
PANELS = [("hit_rate", "hit rate"), ("tpot_ms", "TPOT (ms)")]


def _cells(rows: list[Row], what: str, workload: Workload, clock: Clock) -> dict[str, float]:
    return {
        str(row["variant"]): float(row[what])
        for row in rows
        if (row["workload"], row["model"]) == (workload.name, clock.model.name)
    }


def _row(workload: Workload, clock: Clock, variant: str, policy: str, eviction: str) -> Row:
    simulation = workload.run(policy, load_ratio=clock.load_ratio, eviction=eviction)
    return {
        "workload": workload.name,
        "model": clock.model.name,
        "load_ratio": round(clock.load_ratio, 3),
        "variant": variant,
        "hit_rate": simulation.hit_rate,
        "tpot_ms": simulation.time_per_decode_token * clock.layer_s * 1e3,
        "loads_per_token": simulation.num_loads / simulation.num_tokens,
    }


def _draw(figure: "Figure", lab: Lab, rows: list[Row], variants: tuple[str, ...]) -> None:
    grid = figure.subplots(len(CLOCKS), len(PANELS))
    workloads = (lab.real, lab.embedded)
    for row_of_axes, clock in zip(grid, CLOCKS, strict=True):
        for axes, (what, label) in zip(row_of_axes, PANELS, strict=True):
            heights = {
                variant: [
                    _cells(rows, what, workload, clock).get(variant, math.nan)
                    for workload in workloads
                ]
                for variant in variants
            }
            draw_bars(axes, [workload.name for workload in workloads], heights, label)
            axes.set_title(f"{clock.model.name} sizes (R = {clock.load_ratio:.2f})", fontsize=9)
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(variants)
    )


def figure_12a(lab: Lab) -> FigureResult:
    workloads = (lab.real, lab.embedded)
    rows = [
        _row(workload, clock, policy, policy, "policy")
        for workload in workloads
        for clock in CLOCKS
        for policy in workload.systems(ABLATIONS)
    ]
    findings = []
    for workload in workloads:
        for clock in CLOCKS:
            hits = _cells(rows, "hit_rate", workload, clock)
            shown = ", ".join(f"{LABELS[name]} {hits[name]:.1%}" for name in hits)
            where = f"{workload.name}, R = {clock.load_ratio:.2f}"
            findings += [
                Finding(
                    paper="Hit rate: Map(T) < Map(T+S) < Map(T+S+δ)",
                    ours=f"{where}: {shown}",
                    holds=in_order([hits["map-t"], hits["map-ts"], hits["map-tsd"]])
                    and hits["map-tsd"] > hits["map-t"],
                ),
                Finding(
                    paper="Hit count is the worst",
                    ours=f"{where}: worst is {LABELS[lowest(hits)]}",
                    holds=lowest(hits) == "hit-count",
                ),
            ]

    return FigureResult(
        name="12a",
        title="Ablation: what guides the prefetching",
        source="Simulated, a quarter of the experts, the paper's cache policy under all. GPT-OSS's "
        "trace has no speculative gates (Speculate is left out), its weights sum to 1 over the K "
        "chosen (so δ never adds an expert) and its embeddings are stand-ins made of token ids.",
        rows=rows,
        findings=findings,
        draw=lambda figure: _draw(figure, lab, rows, ABLATIONS),
        size_inches=(9.5, 6.6),
    )


def figure_12b(lab: Lab) -> FigureResult:
    workloads = (lab.real, lab.embedded)
    rows = [
        _row(workload, clock, eviction, "fmoe", eviction)
        for workload in workloads
        for clock in CLOCKS
        for eviction in EVICTIONS
    ]
    findings = []
    for workload in workloads:
        for clock in CLOCKS:
            hits = _cells(rows, "hit_rate", workload, clock)
            missed = {name: 1 - value for name, value in hits.items()}
            findings.append(
                Finding(
                    paper="fMoE's cache policy has the highest hit rate",
                    ours=f"{workload.name}, R = {clock.load_ratio:.2f}, gates not hit: "
                    + listed(missed, "{:.1%}"),
                    holds=hits["fmoe"] >= max(hits.values()) * (1 - TIE),
                )
            )
    return FigureResult(
        name="12b",
        title="Cache policy under the paper's prefetching",
        source="Simulated, policy fmoe with its own victims (1 / (p x freq)), LRU's and LFU's, a "
        "quarter of the experts.",
        rows=rows,
        findings=findings,
        draw=lambda figure: _draw(figure, lab, rows, EVICTIONS),
        size_inches=(9.5, 6.6),
    )
