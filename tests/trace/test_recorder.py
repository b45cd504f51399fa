"""What is recorded row by row, requests mixed, is read back sequence by sequence."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fmoe_ray.errors import TraceError
from fmoe_ray.trace.format import load_trace
from fmoe_ray.trace.recorder import TraceRecorder

L, J, K, H = 2, 4, 2, 3
LIMIT = 2**20
Array = npt.NDArray[Any]


def row(num_tokens: int, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "expert_ids": np.argsort(rng.random((num_tokens, L, J)), axis=-1)[..., :K],
        "weights": rng.random((num_tokens, L, K)).astype(np.float32),
        "token_ids": rng.integers(0, 100, num_tokens),
        "probs": rng.random((num_tokens, L, J)).astype(np.float32),
        "spec_probs": rng.random((num_tokens, L, J)).astype(np.float32),
        "embeddings": rng.standard_normal((num_tokens, H)).astype(np.float32),
    }


def test_rows_of_mixed_requests_become_sequences(tmp_path: Path) -> None:
    now = iter([100.0, 100.5, 102.0])
    recorder = TraceRecorder(
        tmp_path / "t.npz", num_experts=J, max_bytes=LIMIT, clock=lambda: next(now)
    )
    prompt, first, second, other = row(3, 0), row(1, 1), row(1, 2), row(2, 3)
    recorder.record(7, is_prefill=True, **prompt)
    recorder.record(9, is_prefill=True, **other)
    recorder.record(7, is_prefill=False, **first)
    recorder.record(7, is_prefill=False, **second)
    recorder.write()
    trace = load_trace(tmp_path / "t.npz")
    assert trace.sequences() == [(0, 5), (5, 2)]
    assert trace.phase is not None and trace.phase.tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert trace.arrival_s is not None and trace.arrival_s.tolist() == [0.5, 2.0]
    assert recorder.num_tokens == trace.num_tokens == 7
    for name in prompt:
        expected = np.concatenate([part[name] for part in (prompt, first, second, other)])
        np.testing.assert_allclose(getattr(trace, name), expected, rtol=1e-3)


def test_buffers_may_be_reused_after_the_call(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.npz", num_experts=J, max_bytes=LIMIT)
    buffers = {name: part.astype(np.float16) for name, part in row(1, 0).items()}
    buffers["expert_ids"] = row(1, 0)["expert_ids"].astype(np.uint8)
    kept = buffers["weights"].copy()
    recorder.record(1, is_prefill=False, **buffers)
    for buffer in buffers.values():
        buffer.fill(0)
    recorder.write()
    np.testing.assert_array_equal(load_trace(tmp_path / "t.npz").weights, kept)


def test_writing_again_replaces_the_file_by_all_of_it(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.npz", num_experts=J, max_bytes=LIMIT)
    for step in range(3):
        recorder.record(1, is_prefill=False, **row(1, step))
        recorder.write()
    assert load_trace(tmp_path / "t.npz").sequences() == [(0, 3)]


def test_nothing_recorded_writes_no_file(tmp_path: Path) -> None:
    TraceRecorder(tmp_path / "t.npz", num_experts=J, max_bytes=LIMIT).write()
    assert list(tmp_path.iterdir()) == []


def test_a_full_recorder_stops_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # ids, weights, phase, token id, two distributions, embedding; halves but ids and phase
    token_bytes = L * K + 2 * L * K + 1 + 4 + 2 * (2 * L * J) + 2 * H
    recorder = TraceRecorder(tmp_path / "t.npz", num_experts=J, max_bytes=4 * token_bytes - 1)
    with caplog.at_level(logging.WARNING):
        recorder.record(1, is_prefill=True, **row(2, 0))
        recorder.record(1, is_prefill=False, **row(2, 1))
        recorder.record(2, is_prefill=False, **row(1, 2))  # would fit, but after a gap
    assert recorder.num_tokens == 2
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 't.npz'}: recording stops for good at 2 tokens in "
        f"{2 * token_bytes} bytes, the limit is {4 * token_bytes - 1} (offload.record_bytes)"
    ]
    recorder.write()
    assert load_trace(tmp_path / "t.npz").sequences() == [(0, 2)]


def test_a_row_unlike_those_before_is_refused(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.npz", num_experts=J, max_bytes=LIMIT)
    recorder.record(1, is_prefill=False, **row(1, 0))
    without = {name: part for name, part in row(1, 1).items() if name != "probs"}
    with pytest.raises(TraceError, match=r"\['embeddings', 'spec_probs', 'token_ids'\]; the rows"):
        recorder.record(1, is_prefill=False, **without)
    with pytest.raises(TraceError, match=r"weights \[1, 2, 1\]; both are \[n, L, K\]"):
        recorder.record(1, is_prefill=False, **{**row(1, 1), "weights": np.ones((1, L, 1))})
