"""Figure 14b: requests computed together."""

from typing import TYPE_CHECKING

from fmoe_ray.evaluate.figures.claims import is_lowest, lowest
from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.style import LABELS, draw_lines
from fmoe_ray.evaluate.hardware import MODELS, RTX_3090, Clock

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (1, 2, 3, 4)


def figure_14b(lab: Lab) -> FigureResult:
    workloads = (lab.real, lab.embedded)
    rows: list[Row] = []
    for workload in workloads:
        for model in MODELS:
            clock = Clock(model=model, machine=RTX_3090)
            for policy in workload.systems():
                for batch in BATCHES:
                    lab.on_progress(f"figure 14b: {policy}, batch {batch}, {clock}")
                    run = workload.run(policy, load_ratio=clock.load_ratio, batch=batch)
                    rows.append(
                        {
                            "workload": workload.name,
                            "model": model.name,
                            "policy": policy,
                            "batch": batch,
                            "step_ms": run.time / run.num_steps * clock.layer_s * 1e3,
                            "hit_rate": run.hit_rate,
                        }
                    )

    def cell(workload: str, model: str, batch: int) -> dict[str, float]:
        return {
            str(row["policy"]): float(row["step_ms"])
            for row in rows
            if (row["workload"], row["model"], row["batch"]) == (workload, model, batch)
        }

    findings = []
    for workload in workloads:
        cells = [cell(workload.name, model.name, batch) for model in MODELS for batch in BATCHES]
        papers = [{k: v for k, v in values.items() if k != "fmoe+"} for values in cells]
        won = sum(is_lowest("fmoe", values) for values in papers)
        others = {LABELS[lowest(values)] for values in papers if not is_lowest("fmoe", values)}
        findings.append(
            Finding(
                paper="fMoE is the lowest in most cases",
                ours=f"{workload.name}: in {won} of {len(cells)}"
                + (f"; elsewhere {', '.join(sorted(others))}" if others else ""),
                holds=won > len(cells) / 2,
            )
        )

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(2, len(MODELS), sharex=True)
        for row_of_axes, workload in zip(grid, workloads, strict=True):
            for axes, model in zip(row_of_axes, MODELS, strict=True):
                lines = {
                    policy: [cell(workload.name, model.name, batch)[policy] for batch in BATCHES]
                    for policy in workload.systems()
                }
                draw_lines(axes, BATCHES, lines, "batch (requests)", "time of a step (ms)")
                axes.set_title(f"{model.name} sizes, {workload.name}", fontsize=9)
                axes.set_xticks(BATCHES)
                axes.set_ylim(0)
        grid[1][0].legend(fontsize=7)

    return FigureResult(
        name="14b",
        title="Time of a step against the batch",
        source=f"Simulated, a quarter of the experts, {RTX_3090.name}; a layer computes in the "
        "same time for every batch. Steps of the embedded model include prompts.",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(11.0, 6.4),
    )
