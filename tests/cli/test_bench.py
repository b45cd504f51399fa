"""`fmoe bench`: what cannot be measured, or written, is refused before the work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fmoe_ray.cli import bench
from fmoe_ray.errors import ConfigError


def test_a_table_is_not_made_for_a_folder_that_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "families.md"
    done = CliRunner().invoke(bench.app, ["families", "--write", str(target)])
    assert isinstance(done.exception, ConfigError)
    assert str(target) in str(done.exception) and "make it first" in str(done.exception)


@pytest.mark.parametrize(
    "arguments",
    [("channel", "--shards", "0"), ("channel", "--shards", "-3"), ("step", "--batch", "0")],
)
def test_a_number_out_of_range_is_refused_by_name(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(bench.app, list(arguments))
    assert done.exit_code == 2
    assert arguments[1] in done.stderr


@pytest.mark.parametrize("budget", ["abc", "0"])
def test_a_budget_that_is_none_is_refused_before_the_work(budget: str) -> None:
    command = ["engine", "--model", "no-such-folder", "--budget", "0.5", "--budget", budget]
    done = CliRunner().invoke(bench.app, command)
    assert isinstance(done.exception, ConfigError)
    assert f"budget {budget!r}" in str(done.exception)
