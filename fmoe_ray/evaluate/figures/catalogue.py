"""Every figure by its name, and how a choice of them becomes files."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.figures.ablation import figure_12a, figure_12b
from fmoe_ray.evaluate.figures.batch import figure_14b
from fmoe_ray.evaluate.figures.distance import figure_4, figure_13
from fmoe_ray.evaluate.figures.entropy import figure_3
from fmoe_ray.evaluate.figures.figure_result import FigureResult, write_figure
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.models import figure_1b, figure_11, table_1
from fmoe_ray.evaluate.figures.online import figure_10
from fmoe_ray.evaluate.figures.overall import figure_9
from fmoe_ray.evaluate.figures.overhead import figure_15, figure_16
from fmoe_ray.evaluate.figures.page import write_page
from fmoe_ray.evaluate.figures.similarity import figure_8, figure_14a

FIGURES: dict[str, Callable[[Lab], FigureResult]] = {
    "1b": figure_1b,
    "table 1": table_1,
    "3": figure_3,
    "4": figure_4,
    "8": figure_8,
    "9": figure_9,
    "10": figure_10,
    "11": figure_11,
    "12a": figure_12a,
    "12b": figure_12b,
    "13": figure_13,
    "14a": figure_14a,
    "14b": figure_14b,
    "15": figure_15,
    "16": figure_16,
}


def choose(names: Sequence[str]) -> list[str]:
    """In the paper's order; all if none is named. "table1" and "1" both mean table 1.

    Raises ConfigError for a name that is none.
    """
    aliases = {"table1": "table 1", "1": "table 1"}
    wanted = [aliases.get(name.strip(), name.strip()) for name in names]
    for name in wanted:
        if name not in FIGURES:
            raise ConfigError(f"figure {name!r} is unknown; choose from {', '.join(FIGURES)}")
    return [name for name in FIGURES if not wanted or name in wanted]


def render(lab: Lab, names: Sequence[str], folder: Path) -> list[Path]:
    """The files of each figure and index.html with all of them. The folder exists."""
    paths = []
    results = []
    for name in names:
        lab.on_progress(f"figure {name}" if name[0].isdigit() else name)
        results.append(FIGURES[name](lab))
        paths += write_figure(results[-1], folder)
    paths.append(write_page(results, folder))
    return paths
