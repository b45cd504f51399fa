import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fmoe_ray.cli.app import app
from fmoe_ray.errors import EngineError
from fmoe_ray.evaluate.step_bench import measure_steps
from fmoe_ray.evaluate.tiny_models import save_tiny


def test_bench_step_compares_with_both_experts_implementations(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path)
    arguments = ["bench", "step", "--model", str(folder), "--batch", "1", "--batch", "3"]
    result = CliRunner().invoke(app, [*arguments, "--steps", "2", "--threads", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])["steps"]
    assert [times["batch_size"] for times in report] == [1, 3]
    for times in report:
        assert times["step_ms"] > 0
        assert set(times["ratio"]) == set(times["transformers_ms"]) == {"eager", "grouped_mm"}
        assert all(ratio > 0 for ratio in times["ratio"].values())


def test_a_step_that_fails_leaves_no_runner_behind() -> None:
    with pytest.raises(EngineError, match="step 0 failed") as failed:
        measure_steps("tiny", batch_size=1, context=0, steps=1)
    frames = [entry.frame.f_locals for entry in failed.traceback]
    runner = next(local["runner"] for local in frames if "runner" in local)
    with pytest.raises(EngineError, match="used after close"):
        runner.counters()
