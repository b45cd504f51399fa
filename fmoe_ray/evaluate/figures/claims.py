"""Sentences that set the paper's claims beside what came out here."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fmoe_ray.evaluate.figures.figure_result import Finding
from fmoe_ray.evaluate.figures.style import LABELS

TIE = 0.005
"""Values this close, relatively, are one place in an order."""
MIN_CHANGE = 0.01


def percent(change: float) -> str:
    return f"{change:+.0%}"


def lowest(values: Mapping[str, float]) -> str:
    return min(values, key=lambda name: values[name])


def is_lowest(name: str, values: Mapping[str, float]) -> bool:
    return values[name] <= min(values.values()) * (1 + TIE)


def in_order(values: Sequence[float]) -> bool:
    """Rising, ties allowed."""
    return all(a <= b * (1 + TIE) for a, b in pairwise(values))


def listed(values: Mapping[str, float], form: str) -> str:
    """Best first where small is good; `form` such as "{:.1f} ms"."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    return ", ".join(f"{LABELS[name]} {form.format(value)}" for name, value in ordered)


def reductions(
    what: str, paper: Mapping[str, float], ours: Mapping[str, float], where: str
) -> list[Finding]:
    """The change against each baseline: paper's and ours, e.g. -0.44. Holds: the same sign, and at
    least MIN_CHANGE.
    """
    return [
        Finding(
            paper=f"{what} {percent(paper[name])} against {LABELS[name]}",
            ours=f"{percent(ours[name])} ({where})",
            holds=(paper[name] < 0) == (ours[name] < 0) and abs(ours[name]) >= MIN_CHANGE,
        )
        for name in paper
        if name in ours
    ]
