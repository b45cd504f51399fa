"""Figure 10: latency of requests that arrive as Azure's did, from an empty store on."""

from typing import TYPE_CHECKING

import numpy as np

from fmoe_ray.evaluate.figures import arrivals as scaling
from fmoe_ray.evaluate.figures.arrivals import latencies, stretch
from fmoe_ray.evaluate.figures.claims import is_lowest, listed
from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.style import COLOURS, LABELS
from fmoe_ray.evaluate.hardware import MODELS, RTX_3090, Clock

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"conv": "conversation", "code": "code"}


def figure_10(lab: Lab) -> FigureResult:
    rows: list[Row] = []
    findings = []
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    for kind, kind_name in KINDS.items():
        requests, workload = lab.online(kind)
        for model in MODELS:
            clock = Clock(model=model, machine=RTX_3090)
            service = {
                policy: [
                    time * clock.layer_s
                    for time in workload.run(
                        policy, load_ratio=clock.load_ratio, has_learned=False
                    ).request_times
                ]
                for policy in workload.systems()
            }
            arrival_s = stretch(requests.arrival_s, service["deepspeed"])
            means = {}
            for policy, seconds in service.items():
                waited = latencies(arrival_s, seconds)
                curves.setdefault((kind, model.name), {})[policy] = np.sort(waited).tolist()
                means[policy] = float(waited.mean())
                rows.append(
                    {
                        "trace": kind_name,
                        "model": model.name,
                        "policy": policy,
                        "mean_s": means[policy],
                        "p50_s": float(np.percentile(waited, 50)),
                        "p90_s": float(np.percentile(waited, 90)),
                        "p99_s": float(np.percentile(waited, 99)),
                    }
                )
            papers = {name: value for name, value in means.items() if name != "fmoe+"}
            findings.append(
                Finding(
                    paper="fMoE has the lowest latency",
                    ours=f"{kind_name}, {model.name} sizes (R = {clock.load_ratio:.2f}), mean: "
                    + listed(means, "{:.1f} s"),
                    holds=is_lowest("fmoe", papers),
                )
            )

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(len(KINDS), len(MODELS))
        for row_of_axes, (kind, kind_name) in zip(grid, KINDS.items(), strict=True):
            for axes, model in zip(row_of_axes, MODELS, strict=True):
                for policy, waited in curves[kind, model.name].items():
                    share = np.arange(1, len(waited) + 1) / len(waited)
                    axes.step(waited, share, color=COLOURS[policy], label=LABELS[policy])
                axes.set_title(f"{kind_name}, {model.name} sizes", fontsize=9)
                axes.set(xlabel="request latency (s)", ylabel="share of requests", xlim=(0, None))
                axes.grid(alpha=0.3)
        grid[0][0].legend(fontsize=7, loc="lower right")

    return FigureResult(
        name="10",
        title="Online serving of Azure's requests: latency, from an empty store",
        source="Choices of the embedded model on prompts of the scaled lengths (ContextTokens / "
        f"{scaling.PROMPT_DIVISOR}, {scaling.PROMPT_LIMITS[0]} to {scaling.PROMPT_LIMITS[1]}; "
        f"GeneratedTokens / {scaling.ANSWER_DIVISOR}, {scaling.ANSWER_LIMITS[0]} to "
        f"{scaling.ANSWER_LIMITS[1]}), simulated on {RTX_3090.name}, a quarter of the experts, one "
        "request at a time; arrivals of the first 200 requests of Azure's 2023 traces, stretched "
        f"so that DeepSpeed is busy {scaling.UTILISATION:.0%} of the time.",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(11.0, 6.4),
    )
