"""`fmoe bench`: a result that cannot be written is refused before the work."""

from pathlib import Path

from typer.testing import CliRunner

from fmoe_ray.cli import bench
from fmoe_ray.errors import ConfigError


def test_a_table_is_not_made_for_a_folder_that_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "families.md"
    done = CliRunner().invoke(bench.app, ["families", "--write", str(target)])
    assert isinstance(done.exception, ConfigError)
    assert str(target) in str(done.exception) and "make it first" in str(done.exception)
