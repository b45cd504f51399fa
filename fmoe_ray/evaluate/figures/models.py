"""Table 1 (the paper's models), figure 1b (latency against memory) and figure 11 (cache budget)."""

from typing import TYPE_CHECKING

from fmoe_ray.evaluate.figures.claims import is_lowest, listed, lowest, percent, reductions
from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.style import COLOURS, LABELS, draw_lines
from fmoe_ray.evaluate.figures.workload import SYSTEMS, Workload
from fmoe_ray.evaluate.hardware import MACHINES, MIXTRAL, MODELS, RTX_3090, Clock, ModelShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_BILLIONS = {
    "Mixtral-8x7B": ("12.9", "46.7"),
    "Qwen1.5-MoE-A2.7B": ("2.7", "14.3"),
    "Phi-3.5-MoE": ("6.6", "42"),
}
"""Active and all parameters, as the paper rounds them."""
BUDGETS_GB = (6, 12, 24, 48, 96)
PAPER_AT_6_GB = {
    "deepspeed": -0.32,
    "mixtral-offloading": -0.24,
    "promoe": -0.18,
    "moe-infinity": -0.18,
}


def table_1(lab: Lab) -> FigureResult:
    rows: list[Row] = [
        {
            "model": model.name,
            "active_parameters_billion": round(model.active_weights / 1e9, 1),
            "parameters_billion": round(model.total_weights / 1e9, 1),
            "L": model.num_layers,
            "J": model.num_experts,
            "K": model.top_k,
            "expert_MB": round(model.expert_bytes / 1e6, 1),
            "all_experts_GB": round(model.all_experts_bytes / 1e9, 1),
            **{
                f"{machine.name.split(',')[0]}_{name}": round(value, 3)
                for machine in MACHINES
                for name, value in _times(Clock(model=model, machine=machine)).items()
            },
        }
        for model in MODELS
    ]
    return FigureResult(
        name="table 1",
        title="The paper's models, and what they cost on the two machines",
        source="The models' published shapes; formulas and constants of hardware.py: "
        + " ".join(f"{machine.name}: {machine.note}" for machine in MACHINES),
        rows=rows,
        findings=[size_finding(model) for model in MODELS],
        draw=None,
    )


def size_finding(model: ModelShape) -> Finding:
    """Holds where the shape gives the paper's numbers, to the paper's own digits."""
    paper = PAPER_BILLIONS[model.name]
    ours = (model.active_weights / 1e9, model.total_weights / 1e9)
    rounded = [
        f"{number:.{len(text.partition('.')[2])}f}"
        for number, text in zip(ours, paper, strict=True)
    ]
    return Finding(
        paper=f"{model.name}: {paper[0]}B / {paper[1]}B parameters (active / all)",
        ours=f"{ours[0]:.1f}B / {ours[1]:.1f}B",
        holds=rounded == list(paper),
    )


def _times(clock: Clock) -> dict[str, float]:
    return {"load_ms": clock.load_s * 1e3, "layer_ms": clock.layer_s * 1e3, "R": clock.load_ratio}


def figure_1b(lab: Lab) -> FigureResult:
    clock = Clock(model=MIXTRAL, machine=RTX_3090)
    rows: list[Row] = []
    for workload in (lab.real, lab.embedded):
        for policy in workload.systems((*SYSTEMS, "no-offload")):
            budget = 1.0 if policy == "no-offload" else 0.25
            simulation = workload.run(policy, load_ratio=clock.load_ratio, budget=budget)
            rows.append(
                {
                    "workload": workload.name,
                    "policy": policy,
                    "expert_memory_GB": round(budget * MIXTRAL.all_experts_bytes / 1e9, 1),
                    "tpot_ms": simulation.time_per_decode_token * clock.layer_s * 1e3,
                }
            )
    findings = []
    for workload in (lab.real, lab.embedded):
        tpot = {
            str(row["policy"]): float(row["tpot_ms"])
            for row in rows
            if row["workload"] == workload.name and row["policy"] != "no-offload"
        }
        paper_only = {name: value for name, value in tpot.items() if name != "fmoe+"}
        findings.append(
            Finding(
                paper="fMoE lies in the best corner",
                ours=f"{workload.name}, same memory: {listed(tpot, '{:.0f} ms')}",
                holds=is_lowest("fmoe", paper_only),
            )
        )

    def draw(figure: "Figure") -> None:
        for axes, workload in zip(figure.subplots(1, 2), (lab.real, lab.embedded), strict=True):
            for row in rows:
                if row["workload"] == workload.name:
                    policy = str(row["policy"])
                    x, y = float(row["expert_memory_GB"]), float(row["tpot_ms"])
                    axes.plot(x, y, "o", color=COLOURS[policy], label=LABELS[policy])
            axes.set(title=workload.name, xlabel="expert memory (GB)", ylabel="TPOT (ms)")
            axes.set(xlim=(0, 100), ylim=(0, None))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, loc="lower center")

    return FigureResult(
        name="1b",
        title="Latency against memory",
        source=f"Simulated, {clock} (R = {clock.load_ratio:.2f}), a quarter of the experts, no "
        f"offload at its own memory; {_sources(lab)}",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(9.0, 4.0),
    )


def figure_11(lab: Lab) -> FigureResult:
    rows = [
        row
        for workload in (lab.real, lab.embedded)
        for model in MODELS
        for row in _budget_rows(workload, Clock(model=model, machine=RTX_3090))
    ]

    def cell(workload: Workload, model: ModelShape, policy: str) -> list[float]:
        return [
            float(row["tpot_ms"])
            for row in rows
            if (row["workload"], row["model"], row["policy"]) == (workload.name, model.name, policy)
        ]

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(2, len(MODELS), sharex=True)
        for row_of_axes, workload in zip(grid, (lab.real, lab.embedded), strict=True):
            for axes, model in zip(row_of_axes, MODELS, strict=True):
                lines = {name: cell(workload, model, name) for name in workload.systems()}
                draw_lines(axes, BUDGETS_GB, lines, "expert cache (GB)", "TPOT (ms)")
                axes.set_xscale("log", base=2)
                axes.set_xticks(BUDGETS_GB, [str(budget) for budget in BUDGETS_GB])
                axes.set_title(f"{model.name} sizes, {workload.name}", fontsize=9)
                axes.set_ylim(0)
        grid[1][0].legend(fontsize=7)

    return FigureResult(
        name="11",
        title="Time per output token against the budget of the expert cache",
        source=f"Simulated on {RTX_3090.name}: a budget in GB is that fraction of the model's "
        f"experts, at least K, at most all; {_sources(lab)}",
        rows=rows,
        findings=_budget_findings(lab, rows),
        draw=draw,
        size_inches=(11.0, 6.4),
    )


def _budget_rows(workload: Workload, clock: Clock) -> list[Row]:
    rows: list[Row] = []
    for policy in workload.systems():
        for gigabytes in BUDGETS_GB:
            budget = min(1.0, gigabytes * 1e9 / clock.model.all_experts_bytes)
            simulation = workload.run(policy, load_ratio=clock.load_ratio, budget=budget)
            rows.append(
                {
                    "workload": workload.name,
                    "model": clock.model.name,
                    "policy": policy,
                    "budget_GB": gigabytes,
                    "budget_fraction": round(budget, 4),
                    "load_ratio": round(clock.load_ratio, 3),
                    "tpot_ms": simulation.time_per_decode_token * clock.layer_s * 1e3,
                    "hit_rate": simulation.hit_rate,
                }
            )
    return rows


def _budget_findings(lab: Lab, rows: list[Row]) -> list[Finding]:
    findings = []
    for workload in (lab.real, lab.embedded):
        cells: dict[tuple[str, int], dict[str, float]] = {}
        for row in rows:
            if row["workload"] == workload.name and row["policy"] != "fmoe+":
                cell = cells.setdefault((str(row["model"]), int(row["budget_GB"])), {})
                cell[str(row["policy"])] = float(row["tpot_ms"])
        open_cells = {key: cell for key, cell in cells.items() if len(set(cell.values())) > 1}
        won = [key for key, cell in open_cells.items() if is_lowest("fmoe", cell)]
        others = sorted(
            {LABELS[lowest(cell)] for key, cell in open_cells.items() if key not in won}
        )
        findings.append(
            Finding(
                paper="fMoE is always the lowest",
                ours=f"{workload.name}: in {len(won)} of {len(open_cells)} cells"
                + (f"; elsewhere {', '.join(others)}" if others else ""),
                holds=len(won) == len(open_cells),
            )
        )
        at_6 = [cell for (_, gigabytes), cell in open_cells.items() if gigabytes == 6]
        change = {
            name: sum(cell["fmoe"] / cell[name] - 1 for cell in at_6) / len(at_6)
            for name in PAPER_AT_6_GB
            if name in at_6[0]
        }
        where = f"{workload.name}, mean of the models"
        findings += reductions("TPOT at 6 GB:", PAPER_AT_6_GB, change, where)
        if "fmoe+" in workload.systems():
            findings.append(_ours_at_6(workload, rows))
    return findings


def _ours_at_6(workload: Workload, rows: list[Row]) -> Finding:
    tpot = {
        (row["model"], row["policy"]): float(row["tpot_ms"])
        for row in rows
        if row["workload"] == workload.name and row["budget_GB"] == 6
    }
    changes = [tpot[m.name, "fmoe+"] / tpot[m.name, "deepspeed"] - 1 for m in MODELS]
    return Finding(
        paper="(fmoe+ is not in the paper)",
        ours=f"{workload.name}: fmoe+ against LRU at 6 GB, by model: "
        + ", ".join(percent(change) for change in changes),
        holds=None,
    )


def _sources(lab: Lab) -> str:
    return f"choices of {lab.real.name} and of the embedded model, whatever model gives the sizes."
