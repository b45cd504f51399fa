"""Figure 4 (hit rate against the prefetch distance) and figure 13 (latency against it)."""

from typing import TYPE_CHECKING

from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.workload import Workload
from fmoe_ray.evaluate.hardware import MODELS, QWEN, RTX_3090, Clock

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTANCES = (1, 2, 3, 4, 5, 6, 8)
DESIGNS = {"hit-count": "coarse (hit counts)", "fmoe": "fine (expert maps)"}
DESIGN_COLOURS = {"hit-count": "#ff7f0e", "fmoe": "#1f77b4"}


def figure_4(lab: Lab) -> FigureResult:
    clock = Clock(model=QWEN, machine=RTX_3090)
    workloads = (lab.real, lab.embedded)
    rows: list[Row] = []
    for workload in workloads:
        for policy, design in DESIGNS.items():
            for distance in DISTANCES:
                simulation = workload.run(policy, load_ratio=clock.load_ratio, distance=distance)
                rows.append(
                    {
                        "workload": workload.name,
                        "design": design,
                        "policy": policy,
                        "distance": distance,
                        "hit_rate": simulation.hit_rate,
                        "recall_top_k": simulation.recall[distance].top_k
                        if distance in simulation.recall
                        else 0.0,
                    }
                )

    def curve(workload: Workload, policy: str) -> list[float]:
        return [
            float(row["hit_rate"])
            for row in rows
            if (row["workload"], row["policy"]) == (workload.name, policy)
        ]

    findings = []
    for workload in workloads:
        coarse, fine = curve(workload, "hit-count"), curve(workload, "fmoe")
        findings += [
            Finding(
                paper="Fine is higher at every distance",
                ours=f"{workload.name}: d=3 {fine[2]:.1%} against {coarse[2]:.1%}",
                holds=all(a > b for a, b in zip(fine, coarse, strict=True)),
            ),
            Finding(
                paper="Fine degrades less with the distance",
                ours=f"{workload.name}: from d=1 to d={DISTANCES[-1]} fine "
                f"{fine[-1] - fine[0]:+.1%}, coarse {coarse[-1] - coarse[0]:+.1%} (of all gates)",
                holds=fine[-1] - fine[0] >= coarse[-1] - coarse[0],
            ),
        ]

    def draw(figure: "Figure") -> None:
        for axes, workload in zip(figure.subplots(1, 2, sharey=True), workloads, strict=True):
            for policy, design in DESIGNS.items():
                axes.plot(
                    DISTANCES,
                    curve(workload, policy),
                    "o-",
                    color=DESIGN_COLOURS[policy],
                    label=design,
                )
            axes.set(title=workload.name, xlabel="prefetch distance (layers)", ylim=(0, 1))
            axes.set_ylabel("hit rate")
            axes.grid(alpha=0.3)
            axes.legend()

    return FigureResult(
        name="4",
        title="Hit rate against the prefetch distance",
        source=f"Simulated, a quarter of the experts, {clock} (R = {clock.load_ratio:.2f}); "
        "choices of GPT-OSS and of the embedded model.",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(9.0, 3.8),
    )


def figure_13(lab: Lab) -> FigureResult:
    workloads = (lab.real, lab.embedded)
    clocks = [Clock(model=model, machine=RTX_3090) for model in MODELS]
    rows: list[Row] = []
    for workload in workloads:
        for clock in clocks:
            for distance in DISTANCES:
                simulation = workload.run("fmoe", load_ratio=clock.load_ratio, distance=distance)
                has_prompts = simulation.num_tokens > simulation.decode_tokens
                rows.append(
                    {
                        "workload": workload.name,
                        "model": clock.model.name,
                        "distance": distance,
                        "tpot_ms": simulation.time_per_decode_token * clock.layer_s * 1e3,
                        "ttft_ms": simulation.time_to_first_token * clock.layer_s * 1e3
                        if has_prompts
                        else "",
                    }
                )

    def curve(workload: Workload, model: str, what: str) -> list[float]:
        return [
            float(row[what])
            for row in rows
            if (row["workload"], row["model"]) == (workload.name, model)
        ]

    panels = [
        (lab.real, "tpot_ms", "TPOT (ms)"),
        (lab.embedded, "tpot_ms", "TPOT (ms)"),
        (lab.embedded, "ttft_ms", "TTFT (ms)"),
    ]
    findings = []
    for workload, what, label in panels:
        best = {}
        for clock in clocks:
            values = curve(workload, clock.model.name, what)
            best[clock.model.name] = DISTANCES[values.index(min(values))]
        findings.append(
            Finding(
                paper="Best at d=3",
                ours=f"{workload.name}, {label}: "
                + ", ".join(f"{model} d={distance}" for model, distance in best.items()),
                holds=all(distance == 3 for distance in best.values()),
            )
        )

    def draw(figure: "Figure") -> None:
        for axes, (workload, what, label) in zip(figure.subplots(1, 3), panels, strict=True):
            for clock in clocks:
                values = curve(workload, clock.model.name, what)
                relative = [value / values[DISTANCES.index(3)] for value in values]
                axes.plot(
                    DISTANCES,
                    relative,
                    "o-",
                    label=f"{clock.model.name} (R={clock.load_ratio:.2f})",
                )
            axes.set(xlabel="prefetch distance (layers)", ylabel=f"{label[:4]} / that of d=3")
            axes.set_title(f"{label[:4]}, {workload.name}", fontsize=10)
            axes.grid(alpha=0.3)
        figure.axes[0].legend(fontsize=7)

    return FigureResult(
        name="13",
        title="Latency of the paper's policy against the prefetch distance",
        source=f"Simulated, policy fmoe, a quarter of the experts, {RTX_3090.name}; TTFT from the "
        "embedded model, whose trace has prompts.",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(11.0, 3.8),
    )
