"""One HTML page of all figures, self-contained: pictures are inside it, nothing is fetched."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row

_MAX_ROWS = 40
"""A longer table is in the CSV file alone."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222;
  margin: 2em auto; max-width: 76em; padding: 0 1em }
h2 { margin-top: 2.2em; border-bottom: 1px solid #ccc }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: .8em 0; font-size: 13px }
th, td { border: 1px solid #ddd; padding: 3px 8px; text-align: left; vertical-align: top }
th { background: #f4f4f4 }
.yes { color: #17702a; font-weight: bold } .no { color: #b3261e; font-weight: bold }
.source { color: #555 } summary { cursor: pointer; color: #555 }
"""


def write_page(results: Sequence[FigureResult], folder: Path) -> Path:
    """index.html beside the figures' files, which are there already."""
    links = " · ".join(f'<a href="#{result.stem}">{escape(result.name)}</a>' for result in results)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>The paper\'s figures</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>The paper's figures, from what this project measures</h1>",
        "<p>A percentage of the paper holds here where its sign does and it is at least 1%; its "
        "size is beside it. Times are of a simulated clock unless a figure says otherwise.</p>",
        f"<p>{links}</p>",
        *(_section(result, folder) for result in results),
        "</body></html>",
    ]
    path = folder / "index.html"
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return path


def _section(result: FigureResult, folder: Path) -> str:
    label = f"Figure {result.name}" if result.name[0].isdigit() else result.name.capitalize()
    parts = [f'<h2 id="{result.stem}">{escape(label)}: {escape(result.title)}</h2>']
    if result.draw is not None:
        image = base64.b64encode((folder / f"{result.stem}.png").read_bytes()).decode()
        alt = escape(result.title, quote=True)
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{image}">')
    parts.append(f'<p class="source">From: {escape(result.source)}</p>')
    parts.append(_findings(result.findings))
    table = _table(result.rows)
    if result.draw is None:
        parts.append(table)
    elif len(result.rows) <= _MAX_ROWS:
        parts.append(f"<details><summary>Numbers</summary>{table}</details>")
    else:
        parts.append(f"<p>{len(result.rows)} rows of numbers in {result.stem}.csv</p>")
    return "\n".join(parts)


def _findings(findings: Sequence[Finding]) -> str:
    verdicts = {
        True: '<td class="yes">yes</td>',
        False: '<td class="no">no</td>',
        None: "<td>-</td>",
    }
    rows = "\n".join(
        f"<tr><td>{escape(finding.paper)}</td><td>{escape(finding.ours)}</td>"
        f"{verdicts[finding.holds]}</tr>"
        for finding in findings
    )
    return f"<table><tr><th>The paper</th><th>Here</th><th>Holds</th></tr>{rows}</table>"


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
