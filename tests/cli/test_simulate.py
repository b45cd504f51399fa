"""`fmoe simulate` on the shipped trace, as a user calls it."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fmoe_ray
from fmoe_ray.cli.app import app
from fmoe_ray.errors import ConfigError, TraceError

TRACE = str(Path(fmoe_ray.__file__).parent / "assets" / "traces" / "gpt-oss-20b-small.npz")
CELL = ["--budget", "0.25", "--load-ratio", "0.5"]


def output(*args: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_a_row_for_each_policy_budget_and_ratio() -> None:
    options = ["--policy", "lru", "--policy", "ema", *CELL, "--budget", "50%", "--load-ratio", "2"]
    rows = json.loads(output(TRACE, *options, "--json", "--jobs", "2"))["results"]
    assert [(row["budget"], row["load_ratio"], row["policy"]) for row in rows] == [
        (budget, ratio, policy)
        for budget in (0.25, 0.5)
        for ratio in (0.5, 2.0)
        for policy in ("lru", "ema")
    ]
    for row in rows:
        assert 24 <= row["lower_bound"] <= row["clairvoyant"] <= row["belady"] <= row["lru"]
        assert row["time_per_token"] == pytest.approx(24 + row["stall_per_token"])
        assert row["stall_per_token"] == pytest.approx(row["loads_per_token"] * row["load_ratio"])
        assert row["hit_rate"] == pytest.approx(1 - row["misses_per_token"] / (24 * 4))
        gap = (row["lru"] - row["time_per_token"]) / (row["lru"] - row["clairvoyant"])
        assert row["gap_closed"] == pytest.approx(gap)
        assert row["recall"] == {} and row["wasted_per_token"] == row["late_per_token"] == 0
    assert all(row["gap_closed"] == 0 for row in rows if row["policy"] == "lru")


def test_no_gap_is_null() -> None:
    options = ["--policy", "lru", "--budget", "0.25", "--load-ratio", "0", "--json"]
    (row,) = json.loads(output(TRACE, *options))["results"]
    assert row["time_per_token"] == 24 and row["gap_closed"] is None


def test_no_offload_holds_everything_whatever_the_budget() -> None:
    (row,) = json.loads(output(TRACE, "--policy", "no-offload", *CELL, "--json"))["results"]
    assert row["budget"] == 0.25 and row["slots"] == 192
    assert row["loads_per_token"] * row["num_tokens"] == pytest.approx(768)


def test_a_floor_that_ignores_the_budget_says_so() -> None:
    def warning(budget: str) -> str:
        options = ["--policy", "no-offload", "--budget", budget, "--load-ratio", "0.5", "--json"]
        result = CliRunner().invoke(app, ["simulate", TRACE, *options], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stderr

    assert "the engine runs it with budget 100% alone" in warning("0.25")
    assert "warning" not in warning("100%")


def test_the_table_names_policy_bounds_and_units() -> None:
    text = output(TRACE, "--policy", "lru", *CELL)
    assert "0.25 of the experts fit, R = 0.5" in text
    assert re.search(r"lru +\d+\.\d\d +0%", text)
    assert "Belady" in text and "units of one layer's compute" in text


def test_a_batch_and_a_split_change_what_is_measured() -> None:
    whole = ["--policy", "lru", *CELL, "--split", "0", "--json"]
    (one,) = json.loads(output(TRACE, *whole))["results"]
    (four,) = json.loads(output(TRACE, *whole, "--batch", "4"))["results"]
    assert one["num_tokens"] == four["num_tokens"] == 2290
    assert one["time_per_step"] == one["time_per_token"]
    assert four["time_per_step"] > 2 * four["time_per_token"]


def test_a_policy_that_sees_nothing_in_the_trace_is_warned_of() -> None:
    options = ["--policy", "mixtral-offloading", "--policy", "fmoe", *CELL, "--json"]
    result = CliRunner().invoke(app, ["simulate", TRACE, *options], catch_exceptions=False)
    assert "warning: mixtral-offloading predicts from speculative gates" in result.stderr
    assert "warning: fmoe" not in result.stderr
    blind, paper = json.loads(result.stdout)["results"]
    assert blind["prefetched_per_token"] == 0 and blind["recall"] == {}
    assert paper["prefetched_per_token"] > 0
    assert set(paper["recall"]) == {"1", "2", "3"}
    assert all(0 < r["top_k"] <= r["top_2k"] <= 1 for r in paper["recall"].values())


def test_a_plot_is_written_for_each_budget(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    output(TRACE, "--policy", "lru", *CELL, "--load-ratio", "2", "--plot", str(folder))
    (picture,) = folder.iterdir()
    assert picture.name == "time_per_token_0.25.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fmoe_ray.evaluate.plots.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fmoe-ray\[bench\]'"):
        output(TRACE, "--policy", "lru", *CELL, "--plot", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (["--policy", "clever", *CELL], ConfigError, "'clever' is unknown"),
        (["--policy", "lru", "--load-ratio", "1", "--budget", "4GiB"], ConfigError, "expert is"),
        (["--policy", "lru", "--load-ratio", "1", "--budget", "auto"], ConfigError, "fraction"),
        (["--policy", "lru", "--load-ratio", "1", "--budget", "2"], ConfigError, "at least 4"),
        (["--policy", "lru", "--load-ratio", "-1", "--budget", "0.5"], ConfigError, "0 or more"),
        (["--policy", "lru", "--load-ratio", "nan", "--budget", "0.5"], ConfigError, "0 or more"),
        (["--policy", "lru", *CELL, "--split", "1"], TraceError, "leaves none to measure"),
    ],
)
def test_a_wrong_option_is_named(change: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        output(TRACE, *change)


def test_a_missing_trace_is_named() -> None:
    with pytest.raises(TraceError, match=r"none\.npz: cannot be read"):
        output("none.npz", "--policy", "lru", *CELL)
