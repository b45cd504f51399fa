"""`fmoe store`, `fmoe bench matcher` and `fmoe bench store` from the command line."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fmoe_ray.cli.app import app
from fmoe_ray.errors import ConfigError, FingerprintError, StoreUnavailableError
from fmoe_ray.maps import MapStore
from fmoe_ray.maps.file_lock import lock_beside

run = CliRunner()


def write_store(path: Path, *, num_maps: int, seed: int, fingerprint: str = "m") -> MapStore:
    store = MapStore(
        num_layers=2, num_experts=4, top_k=1, capacity=num_maps, fingerprint=fingerprint
    )
    rng = np.random.default_rng(seed)
    store.insert(rng.dirichlet(np.ones(4), size=(num_maps, 2)).astype(np.float32))
    store.save(path)
    return store


def test_info_prints_the_header_of_each_file(tmp_path: Path) -> None:
    write_store(tmp_path / "a", num_maps=3, seed=0)
    result = run.invoke(app, ["store", "info", str(tmp_path / "a")])
    assert result.exit_code == 0
    assert "capacity: 3" in result.output and "fingerprint: m" in result.output


def test_merge_joins_files_into_the_largest_capacity(tmp_path: Path) -> None:
    write_store(tmp_path / "a", num_maps=3, seed=0)
    write_store(tmp_path / "b", num_maps=5, seed=1)
    files = [str(tmp_path / name) for name in ("a", "b")]
    result = run.invoke(app, ["store", "merge", *files, "-o", str(tmp_path / "ab")])
    assert result.exit_code == 0, result.output
    assert len(MapStore.load(tmp_path / "ab")) == 5
    result = run.invoke(
        app, ["store", "merge", *files, "-o", str(tmp_path / "ab"), "--capacity", "20"]
    )
    assert result.exit_code == 0 and "8 maps of 2 files" in result.output


def test_merge_refuses_files_of_two_models(tmp_path: Path) -> None:
    write_store(tmp_path / "a", num_maps=3, seed=0)
    write_store(tmp_path / "b", num_maps=3, seed=0, fingerprint="n")
    result = run.invoke(
        app,
        ["store", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "ab")],
    )
    assert isinstance(result.exception, FingerprintError)
    assert not (tmp_path / "ab").exists()


def test_prune_keeps_so_many_maps(tmp_path: Path) -> None:
    write_store(tmp_path / "a", num_maps=9, seed=0)
    result = run.invoke(app, ["store", "prune", str(tmp_path / "a"), "--capacity", "4"])
    assert result.exit_code == 0, result.output
    pruned = MapStore.load(tmp_path / "a")
    assert (len(pruned), pruned.capacity) == (4, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["merge", "a", "-o", "a"], "5 maps of 1 files"),
        (["prune", "a", "--capacity", "9"], "5 of 5"),
    ],
)
def test_a_file_that_is_being_written_is_waited_for(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a"
    write_store(path, num_maps=3, seed=0)
    is_locked = threading.Event()

    def write_slowly() -> None:
        with lock_beside(path, timeout_s=1):
            is_locked.set()
            time.sleep(0.5)
            write_store(path, num_maps=5, seed=1)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_slowly)
        assert is_locked.wait(5)
        result = run.invoke(app, ["store", *options])
        writing.result(timeout=5)
    assert result.exit_code == 0 and words in result.output


@pytest.mark.parametrize("command", ["status", "stop"])
def test_an_address_where_nobody_listens_is_refused_before_ray_waits_for_it(command: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        result = run.invoke(app, ["store", command, "tiny", "--address", address])
    assert isinstance(result.exception, StoreUnavailableError)
    assert f"{address}: no cluster answers" in str(result.exception)


def test_what_is_no_address_of_a_cluster_is_named() -> None:
    result = run.invoke(app, ["store", "status", "tiny", "--address", "here"])
    assert isinstance(result.exception, ConfigError)
    assert "here: no address; write HOST:PORT" in str(result.exception)


def test_bench_store_reports_each_model_and_the_machine() -> None:
    arguments = ["bench", "store", "--json", "--capacity", "70", "--batch", "3", "--rounds", "1"]
    report = json.loads(run.invoke(app, arguments).output)
    assert [t["case"]["model"] for t in report["timings"]] == ["Mixtral-8x7B", "Qwen3-30B-A3B"]
    assert all(t["case"]["capacity"] == 70 and t["case"]["batch"] == 3 for t in report["timings"])
    assert report["machine"]["gflops"] > 0


def test_bench_matcher_reports_the_search_and_the_memory() -> None:
    result = run.invoke(app, ["bench", "matcher", "--json", "--iterations", "2"])
    report = json.loads(result.output)
    for timing in report["timings"]:
        assert timing["native_us"] > 0
        assert timing["speedup"] == timing["numpy_us"] / timing["native_us"]
    for row in report["memory"]:
        assert row["num_maps"] == 32_000 and row["map_bytes"] < 200e6
