"""How the pictures look: one colour and one name a policy, in every figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "deepspeed": "#7f7f7f",
    "mixtral-offloading": "#8c564b",
    "promoe": "#2ca02c",
    "moe-infinity": "#ff7f0e",
    "fmoe": "#1f77b4",
    "fmoe+": "#d62728",
    "no-offload": "#000000",
    "lru": "#7f7f7f",
    "lfu": "#bcbd22",
    "hit-count": "#ff7f0e",
    "speculate": "#8c564b",
    "map-t": "#aec7e8",
    "map-ts": "#6baed6",
    "map-tsd": "#1f77b4",
}
LABELS = {
    "deepspeed": "DeepSpeed (LRU)",
    "mixtral-offloading": "Mixtral-Offl.",
    "promoe": "ProMoE",
    "moe-infinity": "MoE-Infinity",
    "fmoe": "fMoE (paper)",
    "fmoe+": "fmoe+ (ours)",
    "no-offload": "no offload",
    "lru": "LRU",
    "lfu": "LFU",
    "hit-count": "Hit count",
    "speculate": "Speculate",
    "map-t": "Map(T)",
    "map-ts": "Map(T+S)",
    "map-tsd": "Map(T+S+δ)",
}


def draw_bars(
    axes: "Axes", groups: Sequence[str], heights: Mapping[str, Sequence[float]], ylabel: str
) -> None:
    """heights[policy] has one value a group; one colour a policy, side by side."""
    width = 0.8 / len(heights)
    for number, (policy, values) in enumerate(heights.items()):
        offset = (number - (len(heights) - 1) / 2) * width
        axes.bar(
            [x + offset for x in range(len(groups))],
            values,
            width,
            color=COLOURS[policy],
            label=LABELS[policy],
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.3)


def draw_lines(
    axes: "Axes",
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
) -> None:
    for policy, values in lines.items():
        axes.plot(
            x,
            values,
            "o-",
            color=COLOURS[policy],
            label=LABELS[policy],
            markersize=4,
        )
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
