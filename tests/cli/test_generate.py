"""`fmoe generate` with the model inside the package, and what it says about mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "tiny.yaml")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from fmoe_ray.cli import main; main()", "generate"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


def answer(*arguments: str) -> dict[str, Any]:
    done = run("--config", TINY, "--prompt", "I need a hotel", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert isinstance(body, dict)
    return body


def test_the_budget_changes_the_cost_and_never_the_answer() -> None:
    small = answer("--policy", "lru", "--expert-budget", "0.25", "--max-tokens", "8")
    everything = answer("--policy", "lru", "--expert-budget", "1.0", "--max-tokens", "8")
    assert small["token_ids"] == everything["token_ids"]
    assert small["text"] == everything["text"] != ""
    assert small["stats"]["misses"] > everything["stats"]["misses"]
    assert {"hits", "late", "bytes", "stall_ms", "ttft_ms", "tpot_ms"} <= set(small["stats"])
    assert len(small["token_ids"]) == small["stats"]["completion_tokens"] <= 8


def test_the_text_is_streamed_and_the_statistics_go_to_the_other_stream() -> None:
    done = run("--config", TINY, "--prompt", "Hello", "--max-tokens", "4", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "hits" not in done.stdout
    assert "hits" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", "none.yaml"), "none.yaml: cannot be read"),
        (("--expert-budget", "2 pounds"), "2 pounds"),
        (("--policy", "magic"), "magic"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments: tuple[str, ...], words: str) -> None:
    done = run("--prompt", "x", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("fmoe: ") and words in line


def test_no_ray_is_imported() -> None:
    code = (
        "import sys; sys.argv[1:] = sys.argv[2:]\n"
        "from fmoe_ray.cli.app import app\nimport fmoe_ray.cli\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not any(name.partition('.')[0] == 'ray' for name in sys.modules)"
    )
    command = [sys.executable, "-c", code, "--", "generate", "--config", TINY]
    done = subprocess.run(
        [*command, "--prompt", "x", "--max-tokens", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
