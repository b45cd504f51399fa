"""Figure 3: how predictable experts are, request by request and iteration by iteration."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.workload import IterationMaps, iteration_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ITERATIONS = 2000
GROWTH = 16
"""Iterations over which the growth is followed."""
Floats = npt.NDArray[np.floating]


def entropy_bits(probs: Floats) -> Floats:
    """Shannon's, over the last axis."""
    safe = np.where(probs > 0, probs, 1.0)
    return np.asarray(-(probs * np.log2(safe)).sum(-1))


def figure_3(lab: Lab) -> FigureResult:
    workload = lab.embedded
    maps = iteration_maps(workload.trace, workload.measured, MAX_ITERATIONS)
    by_request = _by_request(maps)
    coarse = np.mean([entropy_bits(probs.mean(axis=0)) for probs in by_request], axis=0)
    fine = np.mean([entropy_bits(probs).mean(axis=0) for probs in by_request], axis=0)
    growth = _growth(by_request)
    rows: list[Row] = [
        {"what": "entropy_bits", "layer": layer + 1, "coarse": float(a), "fine": float(b)}
        for layer, (a, b) in enumerate(zip(coarse, fine, strict=True))
    ]
    rows += [
        {"what": f"growth_iterations_{n + 1}", "layer": 0, "coarse": float(value), "fine": 0.0}
        for n, value in enumerate(growth)
    ]
    longest = max(by_request, key=len)
    findings = [
        Finding(
            paper="Entropy of request-level patterns is clearly higher than of iterations",
            ours=f"{coarse.mean():.2f} against {fine.mean():.2f} bits on average, higher in "
            f"{(coarse > fine).mean():.0%} of the layers",
            holds=bool((coarse > fine).all()),
        ),
        Finding(
            paper="Entropy grows as iterations are aggregated",
            ours=f"from {growth[0]:.2f} bits over one iteration to {growth[-1]:.2f} over "
            f"{len(growth)}",
            holds=bool(growth[-1] > growth[0]),
        ),
    ]

    def draw(figure: "Figure") -> None:
        grid: Any = figure.subplot_mosaic([["coarse", "one", "two"], ["layer", "layer", "growth"]])
        images = [
            ("coarse", "one request, aggregated", longest.mean(axis=0)),
            ("one", "one iteration", longest[1]),
            ("two", "the iteration after it", longest[2]),
        ]
        for name, title, probs in images:
            image = grid[name].imshow(probs, aspect="auto", cmap="viridis", vmin=0, vmax=1)
            grid[name].set(title=title, xlabel="expert", ylabel="layer")
        figure.colorbar(image, ax=grid["two"], label="probability")
        layers = range(1, len(coarse) + 1)
        grid["layer"].plot(layers, coarse, "o-", color="#ff7f0e", label="coarse (request)")
        grid["layer"].plot(layers, fine, "o-", color="#1f77b4", label="fine (iteration)")
        grid["layer"].set(xlabel="layer", ylabel="entropy (bits)", ylim=(0, None))
        grid["layer"].legend()
        grid["growth"].plot(range(1, len(growth) + 1), growth, "o-", color="#ff7f0e")
        grid["growth"].set(xlabel="iterations aggregated", ylabel="entropy (bits)", ylim=(0, None))
        for name in ("layer", "growth"):
            grid[name].grid(alpha=0.3)

    return FigureResult(
        name="3",
        title="Expert patterns: heat maps and Shannon entropy, coarse and fine",
        source="Full gate distributions recorded on the embedded model (12 layers, 8 experts); "
        "GPT-OSS's trace has the chosen experts' weights only.",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(9.5, 6.0),
    )


def _by_request(maps: IterationMaps) -> list[Floats]:
    """Decode iterations [n, L, J] of each request that has at least 3."""
    parts = [
        maps.probs[(maps.request == request) & ~maps.is_prefill]
        for request in np.unique(maps.request)
    ]
    return [part for part in parts if len(part) >= 3]


def _growth(by_request: list[Floats]) -> Floats:
    """[n] mean entropy of the first 1..n iterations aggregated, of requests that have so many."""
    longest = min(GROWTH, max(len(probs) for probs in by_request))
    long = [probs for probs in by_request if len(probs) >= longest]
    counts = np.arange(1, longest + 1)[:, None, None]
    return np.asarray(
        np.mean(
            [
                entropy_bits(np.cumsum(probs[:longest], axis=0) / counts).mean(axis=1)
                for probs in long
            ],
            axis=0,
        )
    )
