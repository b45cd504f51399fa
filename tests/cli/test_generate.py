"""`fmoe generate` with the model inside the package, and what it says about mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    lru = ("--policy", "lru", "--max-tokens", "8")  # on demand: its misses are a matter of slots
    small = answer("--expert-budget", "0.25", *lru)
    everything = answer("--expert-budget", "1.0", *lru)
    assert small["token_ids"] == everything["token_ids"]
    assert small["text"] == everything["text"] != ""
    assert small["stats"]["misses"] > everything["stats"]["misses"]
    assert {"hits", "late", "bytes", "stall_ms", "ttft_ms", "tpot_ms"} <= set(small["stats"])
    assert len(small["token_ids"]) == small["stats"]["completion_tokens"] <= 8


def test_another_policy_drops_what_the_files_policy_alone_uses(tmp_path: Path) -> None:
    document = yaml.safe_load(Path(TINY).read_text())
    args = document["applications"][0]["args"]
    args["offload"].update(policy="fmoe", store_path=str(tmp_path / "maps"))
    args["routing"] = {"by_experts": True}
    config = tmp_path / "fmoe.yaml"
    config.write_text(yaml.safe_dump(document))
    arguments = ("--config", str(config), "--prompt", "Hello", "--max-tokens", "1")
    done = run(*arguments, "--policy", "lru")
    assert done.returncode == 0, done.stderr
    assert "policy lru does not use store_path" in done.stderr


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
        # What HTTP refuses, in the same words.
        (("--temperature", "1", "--seed", "99999999999999999999"), "seed: Input should be less"),
        (("--top-p", "0"), "top_p: Input should be greater than 0"),
        (("--prompt", "\udcff\udcfe"), "is not UTF-8"),  # the bytes ff fe
        (("--prompt", "\udcff", "--raw"), "is not UTF-8"),
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
