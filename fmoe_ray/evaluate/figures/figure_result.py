"""What a figure is: numbers, a picture of them, how they stand to the paper's. Knows no trace."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, str | int | float]
"""One line of the figure's table; every row of a figure has the same keys, units in the names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One claim of the paper beside what came out here."""

    paper: str
    ours: str
    holds: bool | None
    """None where the two cannot be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureResult:
    name: str
    """The paper's: "9", "12a", "table 1"."""
    title: str
    source: str
    """From which traces, simulations or runs."""
    rows: Sequence[Row]
    findings: Sequence[Finding]
    draw: "Callable[[Figure], None] | None"
    """Draws into an empty figure; None for a table."""
    size_inches: tuple[float, float] = (7.0, 4.2)

    @property
    def stem(self) -> str:
        """Name of its files, without the ending."""
        return self.name.replace(" ", "_") if " " in self.name else f"figure_{self.name}"


def write_figure(result: FigureResult, folder: Path) -> list[Path]:
    """stem.json, stem.csv and, where there is a picture, stem.png. The folder exists."""
    body = {
        "figure": result.name,
        "title": result.title,
        "source": result.source,
        "rows": result.rows,
        "findings": [asdict(finding) for finding in result.findings],
    }
    paths = [folder / f"{result.stem}.json", folder / f"{result.stem}.csv"]
    paths[0].write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(result.rows[0]))
        writer.writeheader()
        writer.writerows(result.rows)
    if result.draw is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=result.size_inches, layout="constrained")
        result.draw(figure)
        paths.append(folder / f"{result.stem}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
