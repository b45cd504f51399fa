"""The session of tests itself: nothing in it waits for ever, and no unit test starts Ray."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_test_that_hangs_ends_the_session_with_its_stack(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 900
    test = tmp_path / "test_hanging.py"
    test.write_text("import time\n\n\ndef test_it() -> None:\n    time.sleep(600)\n")
    shortened = ["-c", str(ROOT / "pyproject.toml"), "-o", "faulthandler_timeout=1"]
    command = [sys.executable, "-m", "pytest", *shortened, "-p", "no:cacheprovider", str(test)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "in test_it" in ended.stderr


def test_a_unit_test_cannot_start_ray() -> None:
    with pytest.raises(AssertionError, match="without the marker `ray`"):
        import_module("ray").init("ray://127.0.0.1:1")
