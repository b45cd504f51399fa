"""Figure 9: time to first token, time per output token and hit rate of all systems."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fmoe_ray.evaluate.figures.claims import is_lowest, listed, percent, reductions
from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.style import COLOURS, LABELS, draw_bars
from fmoe_ray.evaluate.figures.workload import BASELINES, SYSTEMS, Workload
from fmoe_ray.evaluate.hardware import H200, MACHINES, MODELS, RTX_3090, Clock, Machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENGINE = "engine, throttled CPU"
PAPER_TTFT = dict(zip(BASELINES, (-0.44, -0.35, -0.33, -0.30), strict=True))
PAPER_TPOT = dict(zip(BASELINES, (-0.70, -0.61, -0.55, -0.48), strict=True))
PAPER_HITS = dict(zip(BASELINES, (1.47, 0.11, 0.34, 0.63), strict=True))
UNITS = {"ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms)", "hit_rate": "hit rate"}


class _Table:
    """Values by workload, machine, model and policy."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def value(self, what: str, workload: str, machine: str, model: str, policy: str) -> float:
        (found,) = [
            float(row[what])
            for row in self.rows
            if (row["workload"], row["machine"], row["model"], row["policy"])
            == (workload, machine, model, policy)
        ]
        return found

    def changes(self, what: str, workload: str, machine: str, policy: str) -> dict[str, float]:
        """policy against each baseline there is, mean over the models."""
        known = {str(row["policy"]) for row in self.rows if row["workload"] == workload}
        return {
            base: sum(
                self.value(what, workload, machine, model.name, policy)
                / self.value(what, workload, machine, model.name, base)
                - 1
                for model in MODELS
            )
            / len(MODELS)
            for base in BASELINES
            if base in known
        }


def figure_9(lab: Lab) -> FigureResult:
    table = _Table(_simulated(lab) + _engine(lab))

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(3, 3)
        names = [model.name.split("-")[0] for model in MODELS]

        def draw_models(axes: "Axes", what: str, workload: Workload, machine: Machine) -> None:
            heights = {
                policy: [
                    table.value(what, workload.name, machine.name, model.name, policy)
                    for model in MODELS
                ]
                for policy in workload.systems()
            }
            draw_bars(axes, names, heights, UNITS[what])
            axes.set_title(f"{workload.name}, {machine.name.split(',')[0]}", fontsize=9)

        draw_models(grid[0][0], "tpot_ms", lab.real, RTX_3090)
        draw_models(grid[0][1], "tpot_ms", lab.real, H200)
        draw_models(grid[0][2], "hit_rate", lab.real, RTX_3090)
        for axes, what in zip(grid[1], UNITS, strict=True):
            draw_models(axes, what, lab.embedded, RTX_3090)
        grid[1][0].legend(fontsize=7)
        _draw_engine(grid[2], table.rows)

    return FigureResult(
        name="9",
        title="Time to first token, time per output token and hit rate",
        source=f"Simulated, a quarter of the experts, on {' and '.join(m.name for m in MACHINES)}: "
        f"choices of {lab.real.name} (decode alone; Mixtral-Offloading needs speculative gates, "
        "which that trace has not) and of the embedded model (prompts too). Last row: the engine "
        f"itself on a throttled CPU, embedded model, {lab.bench.conditions.held_out} dialogues. A "
        "hit is an expert that is ready when its gate asks; one still on its way is late.",
        rows=table.rows,
        findings=_findings(lab, table),
        draw=draw,
        size_inches=(11.0, 9.0),
    )


def _simulated(lab: Lab) -> list[Row]:
    rows: list[Row] = []
    for workload in (lab.real, lab.embedded):
        for machine in MACHINES:
            for model in MODELS:
                clock = Clock(model=model, machine=machine)
                for policy in workload.systems():
                    lab.on_progress(f"figure 9: {policy}, {clock}")
                    run = workload.run(policy, load_ratio=clock.load_ratio)
                    has_prompts = run.num_tokens > run.decode_tokens
                    asked = run.hits + run.late + run.misses
                    rows.append(
                        {
                            "workload": workload.name,
                            "machine": machine.name,
                            "model": model.name,
                            "load_ratio": round(clock.load_ratio, 3),
                            "policy": policy,
                            "ttft_ms": run.time_to_first_token * clock.layer_s * 1e3
                            if has_prompts
                            else "",
                            "tpot_ms": run.time_per_decode_token * clock.layer_s * 1e3,
                            "hit_rate": run.hit_rate,
                            "late_rate": run.late / asked,
                        }
                    )
    return rows


def _engine(lab: Lab) -> list[Row]:
    report = lab.bench
    return [
        {
            "workload": ENGINE,
            "machine": "CPU",
            "model": "embedded model",
            "load_ratio": report.conditions.load_ratio,
            "policy": result.policy,
            "ttft_ms": result.ttft_ms,
            "tpot_ms": result.tpot_ms,
            "hit_rate": result.hit_rate,
            "late_rate": result.late_rate,
        }
        for result in report.policies
        if result.policy in SYSTEMS
    ]


def _draw_engine(row_of_axes: "Sequence[Axes]", rows: list[Row]) -> None:
    measured = {str(row["policy"]): row for row in rows if row["workload"] == ENGINE}
    policies = [policy for policy in SYSTEMS if policy in measured]
    for axes, (what, label) in zip(row_of_axes, UNITS.items(), strict=True):
        values = [float(measured[policy][what]) for policy in policies]
        colours = [COLOURS[policy] for policy in policies]
        axes.barh([LABELS[policy] for policy in policies], values, color=colours)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.set_title(ENGINE, fontsize=9)
        axes.grid(axis="x", alpha=0.3)


def _findings(lab: Lab, table: _Table) -> list[Finding]:
    place = RTX_3090.name.split(",")[0]
    findings = []
    for what, label, paper, workloads in (
        ("ttft_ms", "TTFT", PAPER_TTFT, [lab.embedded]),
        ("tpot_ms", "TPOT", PAPER_TPOT, [lab.real, lab.embedded]),
        ("hit_rate", "Hit rate", PAPER_HITS, [lab.real, lab.embedded]),
    ):
        for workload in workloads:
            changes = table.changes(what, workload.name, RTX_3090.name, "fmoe")
            where = f"{workload.name}, {place}, mean of the models"
            findings += reductions(f"{label}:", paper, changes, where)
    for workload in (lab.real, lab.embedded):
        for machine in MACHINES:
            findings += [
                _order(table, workload, Clock(model=model, machine=machine)) for model in MODELS
            ]
            if "fmoe+" in workload.systems():
                changes = table.changes("tpot_ms", workload.name, machine.name, "fmoe+")
                findings.append(
                    Finding(
                        paper="(fmoe+ is not in the paper)",
                        ours=f"{workload.name}, {machine.name}: TPOT of fmoe+ against "
                        + ", ".join(f"{LABELS[b]} {percent(c)}" for b, c in changes.items()),
                        holds=None,
                    )
                )
    return findings


def _order(table: _Table, workload: Workload, clock: Clock) -> Finding:
    tpot = {
        policy: table.value("tpot_ms", workload.name, clock.machine.name, clock.model.name, policy)
        for policy in workload.systems()
    }
    papers = {name: value for name, value in tpot.items() if name != "fmoe+"}
    return Finding(
        paper="fMoE has the lowest TPOT",
        ours=f"{workload.name}, {clock} (R = {clock.load_ratio:.1f}): " + listed(tpot, "{:.0f} ms"),
        holds=is_lowest("fmoe", papers),
    )
