"""Pictures of the policy table. matplotlib comes with the extra `bench`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.policy_table import Row


def require_matplotlib() -> None:
    """Raises ConfigError where it is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'fmoe-ray[bench]'")


def plot_policy_table(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One PNG a budget: time per token against load ratio, with the bounds. Makes the folder.

    Raises ConfigError without matplotlib or where the folder cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from error
    paths = []
    for budget in dict.fromkeys(row.budget for row in rows):
        figure = Figure(figsize=(6.4, 4.8), layout="constrained")
        axes = figure.subplots()
        for label, style, points in _curves([row for row in rows if row.budget == budget]):
            axes.plot(*zip(*points, strict=True), style, label=label)
        axes.set(
            title=f"{budget:.3g} of the experts fit",
            xlabel="load time of an expert / compute time of a layer",
            ylabel="time per token (layers)",
        )
        axes.legend()
        path = folder / f"time_per_token_{budget:.3g}.png"
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        paths.append(path)
    return paths


def _curves(rows: Sequence[Row]) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """(label, line style, points by load ratio) of each policy and of the bounds."""
    rows = sorted(rows, key=lambda row: row.load_ratio)
    curves = [
        (
            policy,
            "o-",
            [
                (row.load_ratio, row.simulation.time_per_token)
                for row in rows
                if row.policy == policy
            ],
        )
        for policy in dict.fromkeys(row.policy for row in rows)
    ]
    bounds = {row.load_ratio: row.bounds for row in rows}
    curves += [
        ("Belady, no prefetch", "k--", [(ratio, b.belady) for ratio, b in bounds.items()]),
        ("clairvoyant", "k:", [(ratio, b.clairvoyant) for ratio, b in bounds.items()]),
    ]
    return curves
