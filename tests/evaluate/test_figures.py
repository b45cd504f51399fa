"""The paper's figures: files, their schema, and the arithmetic behind them."""

import csv
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fmoe_ray.cli.app import app
from fmoe_ray.cli.evaluate import SMALL_TRACE
from fmoe_ray.config import Budget, OffloadSettings
from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.figures.arrivals import (
    UTILISATION,
    latencies,
    load_arrivals,
    prompts_of_length,
    stretch,
)
from fmoe_ray.evaluate.figures.catalogue import FIGURES, choose
from fmoe_ray.evaluate.figures.entropy import entropy_bits
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.models import size_finding
from fmoe_ray.evaluate.figures.workload import iteration_maps
from fmoe_ray.evaluate.hardware import H200, MIXTRAL, MODELS, PHI, QWEN, RTX_3090, Clock
from fmoe_ray.evaluate.policy_bench import Conditions, PolicyBench
from fmoe_ray.trace.format import RoutingTrace, load_trace

PNG = b"\x89PNG"


def figures(*options: str) -> None:
    result = CliRunner().invoke(app, ["evaluate", "figures", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def check_files(folder: Path, name: str) -> None:
    stem = name.replace(" ", "_") if " " in name else f"figure_{name}"
    body = json.loads((folder / f"{stem}.json").read_text())
    assert set(body) == {"figure", "title", "source", "rows", "findings"}
    assert body["figure"] == name and body["source"]
    assert body["rows"] and body["findings"]
    for finding in body["findings"]:
        assert set(finding) == {"paper", "ours", "holds"}
        assert finding["holds"] in (True, False, None)
    with (folder / f"{stem}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(body["rows"]) and set(rows[0]) == set(body["rows"][0])
    if " " not in name:
        assert (folder / f"{stem}.png").read_bytes().startswith(PNG)


def test_chosen_figures_become_files_and_one_self_contained_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures("--out", str(tmp_path), "--only", "16,table1")
    for name in ("16", "table 1"):
        check_files(tmp_path, name)
    page = (tmp_path / "index.html").read_text()
    assert "Figure 16" in page and "Mixtral-8x7B" in page
    assert re.findall(r'(?:src|href)="(?!data:image/png|#)', page) == []
    assert len(list(tmp_path.glob("*.png"))) == 1


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures("--out", str(tmp_path))
    for name in FIGURES:
        check_files(tmp_path, name)


def test_all_of_the_papers_figures_are_there_in_its_order() -> None:
    wanted = "1b,table 1,3,4,8,9,10,11,12a,12b,13,14a,14b,15,16"
    assert choose([]) == wanted.split(",")
    assert choose(["9", "1b", "1"]) == ["1b", "table 1", "9"]
    with pytest.raises(ConfigError, match=r"figure '7' is unknown"):
        choose(["7"])


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fmoe_ray.evaluate.plots.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fmoe-ray\[bench\]'"):
        figures("--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_sizes_of_the_models_follow_from_their_shapes() -> None:
    wanted = {"Mixtral-8x7B": 46.7, "Qwen1.5-MoE-A2.7B": 14.3, "Phi-3.5-MoE": 41.9}
    for model in MODELS:
        assert model.total_weights / 1e9 == pytest.approx(wanted[model.name], abs=0.06)
    assert MIXTRAL.expert_bytes == 3 * 4096 * 14336 * 2
    assert MIXTRAL.all_experts_bytes == 32 * 8 * MIXTRAL.expert_bytes


def test_a_size_holds_only_where_the_shape_gives_the_papers_digits() -> None:
    assert all(size_finding(model).holds for model in MODELS)
    assert not size_finding(replace(MIXTRAL, num_layers=31)).holds
    assert not size_finding(replace(PHI, top_k=3)).holds


def test_the_load_ratio_is_load_time_by_layer_time() -> None:
    clock = Clock(model=QWEN, machine=H200)
    assert clock.load_ratio == clock.load_s / clock.layer_s
    assert clock.load_s == pytest.approx(17.3e6 / 55e9, rel=0.01)
    assert clock.layer_s > H200.software_s
    # A larger expert on a slower link costs more layers.
    assert Clock(model=PHI, machine=RTX_3090).load_ratio > clock.load_ratio


def test_entropy_of_a_uniform_distribution_is_its_bits_and_of_a_certain_one_0() -> None:
    assert entropy_bits(np.full((2, 8), 1 / 8)) == pytest.approx([3, 3])
    assert entropy_bits(np.eye(4)) == pytest.approx([0, 0, 0, 0])


def test_a_request_waits_for_those_before_it() -> None:
    waited = latencies(np.array([0.0, 1.0, 10.0]), [3.0, 2.0, 1.0])
    assert waited.tolist() == [3.0, 4.0, 1.0]
    arrival_s = stretch(np.array([0.0, 1.0, 2.0]), [3.0, 2.0, 1.0])
    assert arrival_s[-1] == pytest.approx(6.0 / UTILISATION)


def test_arrivals_are_scaled_within_their_limits_and_prompts_have_those_lengths() -> None:
    for kind in ("conv", "code"):
        arrivals = load_arrivals(kind)
        assert len(arrivals.arrival_s) == 200 and arrivals.arrival_s[0] == 0
        assert (np.diff(arrivals.arrival_s) >= 0).all()
        assert min(arrivals.prompt_tokens) >= 4 and max(arrivals.prompt_tokens) <= 400
        assert min(arrivals.answer_tokens) >= 2 and max(arrivals.answer_tokens) <= 48
    prompts = prompts_of_length([[1, 2, 3], [4, 5]], [4, 2, 1])
    assert prompts == [[1, 2, 3, 4], [1, 2], [4]]


def test_an_iteration_map_is_the_mean_of_a_prompts_tokens_and_then_one_token_each() -> None:
    trace = RoutingTrace(
        expert_ids=np.array([[[0, 1]], [[1, 2]], [[2, 0]]]),
        weights=np.array([[[0.5, 0.5]], [[0.75, 0.25]], [[2.0, 6.0]]], np.float32),
        seq_start=np.array([0]),
        seq_len=np.array([3]),
        num_experts=3,
        phase=np.array([0, 0, 1], np.uint8),
    )
    maps = iteration_maps(trace, trace.sequences(), 10)
    assert maps.probs[:, 0].tolist() == [[0.25, 0.625, 0.125], [0.75, 0.0, 0.25]]
    assert maps.chosen[:, 0].tolist() == [[True, True, True], [True, False, True]]
    assert maps.is_prefill.tolist() == [True, False] and maps.request.tolist() == [0, 0]
    assert maps.embeddings is None


def test_an_iteration_map_of_a_recorded_token_has_its_k_weights() -> None:
    trace = load_trace(SMALL_TRACE)
    maps = iteration_maps(trace, trace.sequences()[:1], 5)
    assert maps.probs.shape == (5, 24, 32)
    assert (maps.chosen.sum(-1) == 4).all() and ((maps.probs > 0) <= maps.chosen).all()
    assert maps.probs.sum(-1) == pytest.approx(np.ones((5, 24)), abs=1e-5)


def test_what_was_measured_is_read_again_only_under_the_same_conditions(tmp_path: Path) -> None:
    lab = Lab(tmp_path, SMALL_TRACE)
    bench = PolicyBench(
        conditions=Conditions(
            seen=300,
            held_out=12,
            max_tokens=24,
            budget="0.25",
            load_ratio=0.5,
            layer_ms=1.0,
            load_ms=0.5,
            link_gbps=1.0,
        ),
        policies=[],
    )
    lab.bench_path.write_text(json.dumps(asdict(bench)))
    assert Lab(tmp_path, SMALL_TRACE).bench == bench
    others = [
        Lab(tmp_path, SMALL_TRACE, seen=5),
        Lab(tmp_path, SMALL_TRACE, max_tokens=5),
        Lab(tmp_path, SMALL_TRACE, bench_dialogues=5),
    ]
    slower = Lab(tmp_path, SMALL_TRACE)
    slower.settings = slower.settings.model_copy(
        update={"offload": OffloadSettings(budget=Budget(fraction=0.5))}
    )
    assert not any(other.bench_path.exists() for other in (*others, slower))


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    lab = Lab(tmp_path, SMALL_TRACE)
    lab.bench_path.write_text("{}")
    with pytest.raises(ConfigError, match=r"engine-\w+\.json: damaged .*delete it"):
        _ = lab.bench
