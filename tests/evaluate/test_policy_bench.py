"""The benchmark of policies at a small size: never a timing, always the tokens."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fmoe_ray.cli.app import app
from fmoe_ray.config import EngineSettings, OffloadSettings, Settings
from fmoe_ray.errors import ConfigError, EngineError
from fmoe_ray.evaluate.policy_bench import PolicyResult, _require_equal_tokens, bench_policies
from fmoe_ray.policy import list_policies

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def test_every_policy_answers_with_the_same_tokens_while_experts_are_missing() -> None:
    settings = Settings(
        offload=OffloadSettings(budget="25%"),  # type: ignore[arg-type]
        engine=EngineSettings(num_threads=1),
    )
    report = bench_policies(settings, seen=4, held_out=2, max_tokens=6)
    assert [result.policy for result in report.policies] == [p.name for p in list_policies()]
    assert len({result.tokens_sha256 for result in report.policies}) == 1
    for result in report.policies:
        assert result.num_tokens > 2 and result.tpot_ms > 0
        if result.policy == "no-offload":
            assert result.hit_rate == 1
        else:
            assert result.hit_rate < 1 and result.stall_ms > 0
    conditions = report.conditions
    assert conditions.load_ms == pytest.approx(conditions.load_ratio * conditions.layer_ms)


def test_the_command_prints_a_row_for_each_policy_and_its_settings() -> None:
    options = ["--policy", "lru", "--policy", "fmoe", "--seen", "2", "--held-out", "1"]
    result = CliRunner().invoke(
        app,
        ["bench", "policies", "--config", str(CONFIG), *options, "--max-tokens", "4", "--json"],
        catch_exceptions=False,
    )
    report = json.loads(result.stdout)
    assert [row["policy"] for row in report["policies"]] == ["lru", "fmoe"]
    for row in report["policies"]:
        assert {"hit_rate", "stall_ms", "tpot_ms", "tokens_sha256"} <= set(row)
    assert report["settings"]["seen"] == 2 and report["settings"]["budget"] == "0.25"


def test_more_dialogues_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the package has 400"):
        bench_policies(Settings(), seen=390, held_out=11)


def test_a_gpu_is_refused() -> None:
    settings = Settings.model_validate({"model": {"device": "cuda"}})
    with pytest.raises(ConfigError, match="only a CPU's link"):
        bench_policies(settings, seen=0, held_out=1)


def test_policies_that_answer_differently_are_named() -> None:
    def result(policy: str, sha: str) -> PolicyResult:
        return PolicyResult(
            policy=policy,
            hit_rate=0.5,
            late_rate=0.0,
            stall_ms=1.0,
            tpot_ms=2.0,
            tpot_median_ms=2.0,
            ttft_ms=3.0,
            prefill_hit_rate=0.5,
            prefetched_bytes=0.0,
            num_tokens=1,
            tokens_sha256=sha,
        )

    with pytest.raises(EngineError, match="lru, ema; fmoe"):
        _require_equal_tokens([result("lru", "a"), result("fmoe", "b"), result("ema", "a")])
