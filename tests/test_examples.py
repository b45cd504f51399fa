"""The examples run, and importing the package stays cheap."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmoe_ray.api.stub_server import stub_server

EXAMPLES = Path(__file__).parents[1] / "examples"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub_server() as url:
        yield url


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_http_example_prints_an_answer_twice(url: str) -> None:
    output = run(str(EXAMPLES / "http_client.py"), url)
    assert output.count(ALPHABET) == 2
    assert "misses" in output


def test_the_async_example_prints_all_answers(url: str) -> None:
    assert run(str(EXAMPLES / "async_streaming.py"), url).count(ALPHABET) == 3


@pytest.mark.parametrize("module", ["ray", "torch", "httpx", "numpy", "fmoe_ray._native"])
def test_importing_the_package_imports_nothing_heavy(module: str) -> None:
    code = f"import fmoe_ray, sys; assert {module!r} not in sys.modules"
    run("-c", code)


def test_the_clients_are_there_without_ray() -> None:
    run(
        "-c",
        "import sys; from fmoe_ray import AsyncClient, Client; assert 'ray' not in sys.modules",
    )
