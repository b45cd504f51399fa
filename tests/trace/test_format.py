"""A trace that is read is well-formed; one that is not says which field, index and value."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmoe_ray.errors import TraceError
from fmoe_ray.trace.format import RoutingTrace, load_trace, save_trace

T, L, J, K, S = 6, 2, 4, 2, 2


def parts() -> dict[str, Any]:
    """A well-formed trace with every optional part."""
    rng = np.random.default_rng(0)
    return {
        "expert_ids": np.argsort(rng.random((T, L, J)), axis=-1)[..., :K].astype(np.uint8),
        "weights": rng.random((T, L, K)).astype(np.float16),
        "seq_start": np.array([0, 4]),
        "seq_len": np.array([4, 2]),
        "num_experts": J,
        "token_ids": np.arange(T, dtype=np.int32),
        "probs": rng.random((T, L, J)).astype(np.float16),
        "spec_probs": rng.random((T, L, J)).astype(np.float32),
        "phase": np.array([0, 0, 1, 1, 0, 1], np.uint8),
        "arrival_s": np.array([0.0, 1e9 + 0.25]),
        "embeddings": rng.standard_normal((T, 3)).astype(np.float32),
    }


def changed(name: str, index: Any, value: Any) -> dict[str, Any]:
    broken = parts()
    array = np.array(broken[name], dtype=np.int64 if name == "expert_ids" else None)
    array[index] = value
    return {**broken, name: array}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    trace = RoutingTrace(**parts())
    save_trace(tmp_path / "trace.npz", trace)
    loaded = load_trace(tmp_path / "trace.npz")
    for name, part in parts().items():
        np.testing.assert_array_equal(getattr(loaded, name), part)
        assert np.asarray(getattr(loaded, name)).dtype == np.asarray(part).dtype
    assert [path.name for path in tmp_path.iterdir()] == ["trace.npz"]


def test_optional_parts_may_be_missing(tmp_path: Path) -> None:
    required = ("expert_ids", "weights", "seq_start", "seq_len", "num_experts")
    np.savez(tmp_path / "trace.npz", **{name: parts()[name] for name in required})
    loaded = load_trace(tmp_path / "trace.npz")
    assert (loaded.num_tokens, loaded.num_layers, loaded.top_k) == (T, L, K)
    assert loaded.probs is None and loaded.token_ids is None and loaded.phase is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_ids_of_any_integer_type_are_the_same(dtype: type[np.generic]) -> None:
    ids = parts()["expert_ids"]
    trace = RoutingTrace(**{**parts(), "expert_ids": ids.astype(dtype)})
    assert trace.expert_ids.dtype == np.uint8
    np.testing.assert_array_equal(trace.expert_ids, ids)


def test_more_than_256_experts_take_two_bytes() -> None:
    ids = np.array([[[299, 1]]])
    trace = RoutingTrace(
        expert_ids=ids,
        weights=np.ones((1, 1, 2), np.float32),
        seq_start=np.array([0]),
        seq_len=np.array([1]),
        num_experts=300,
    )
    assert trace.expert_ids.dtype == np.uint16 and trace.expert_ids[0, 0, 0] == 299


def test_weights_need_not_sum_to_one_and_doubles_become_single() -> None:
    trace = RoutingTrace(**{**parts(), "weights": np.full((T, L, K), 7.5)})
    assert trace.weights.dtype == np.float32 and trace.weights.max() == 7.5


def test_num_experts_may_be_an_array_of_one() -> None:
    assert RoutingTrace(**{**parts(), "num_experts": np.array([J])}).num_experts == J


def test_an_unknown_array_is_left_out_with_a_warning(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", allow_pickle=False, **parts(), comment=np.arange(3))
    with pytest.warns(UserWarning, match="comment left out: unknown to the format"):
        assert load_trace(tmp_path / "trace.npz").num_sequences == S


def test_sequences_may_lie_in_any_order_and_leave_gaps() -> None:
    trace = RoutingTrace(**{**parts(), "seq_start": np.array([5, 0]), "seq_len": np.array([1, 3])})
    assert trace.sequences() == [(5, 1), (0, 3)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (changed("expert_ids", (1, 0, 1), 4), r"expert_ids\[1, 0, 1\] is 4; num_experts is 4"),
        (changed("expert_ids", (2, 1, 0), -1), r"expert_ids\[2, 1, 0\] is -1"),
        (changed("expert_ids", (3, 1), [2, 2]), r"expert_ids\[3, 1\] is \[2, 2\]; .* once"),
        (changed("weights", (0, 1, 1), np.nan), r"weights\[0, 1, 1\] is nan; .*at least 0"),
        (changed("weights", (5, 0, 0), -0.5), r"weights\[5, 0, 0\] is -0.5"),
        (changed("weights", (5, 0, 0), np.inf), r"weights\[5, 0, 0\] is inf"),
        (changed("probs", (1, 1, 3), np.nan), r"probs\[1, 1, 3\] is nan"),
        (changed("spec_probs", (1, 1, 3), -1), r"spec_probs\[1, 1, 3\] is -1.0"),
        (changed("embeddings", (2, 2), np.inf), r"embeddings\[2, 2\] is inf; finite"),
        (changed("arrival_s", 1, np.nan), r"arrival_s\[1\] is nan"),
        (changed("phase", 3, 2), r"phase\[3\] is 2; 0 is prefill, 1 is decode"),
        (changed("seq_start", 1, 6), r"seq_start\[1\] is 6; the trace has 6 tokens"),
        (changed("seq_start", 1, -1), r"seq_start\[1\] is -1"),
        (changed("seq_start", 1, 3), r"seq_start\[1\] is 3, inside sequence 0, .*tokens 0 to 3"),
        (changed("seq_len", 1, 3), r"seq_len\[1\] is 3; .*ends outside the trace"),
        (changed("seq_len", 0, 0), r"seq_len\[0\] is 0; .*at least 1 token"),
        ({**parts(), "num_experts": 0}, r"num_experts is 0; 1 to 65536"),
        ({**parts(), "num_experts": 70000}, r"num_experts is 70000"),
        ({**parts(), "num_experts": np.array([4, 4])}, r"num_experts is .*one integer is needed"),
        ({**parts(), "num_experts": 1}, r"K from 1 to num_experts = 1"),
        ({**parts(), "expert_ids": np.zeros((T, L), int)}, r"expert_ids has shape \[6, 2\]"),
        ({**parts(), "expert_ids": np.zeros((T, L, K))}, r"expert_ids has dtype float64"),
        ({**parts(), "weights": np.zeros((T, L, K + 1), "f4")}, r"weights .*T=6, L=2, K=2"),
        ({**parts(), "weights": np.zeros((T, L, K), int)}, r"weights has dtype int64"),
        ({**parts(), "probs": np.zeros((T, L, K), "f4")}, r"probs has shape .*J=4"),
        ({**parts(), "seq_len": np.array([1])}, r"seq_len has shape \[1\]; \[S\] .*S=2"),
        ({**parts(), "seq_start": np.array([0.0, 4.0])}, r"seq_start has dtype float64"),
        ({**parts(), "token_ids": np.array([2**40] * T)}, r"token_ids\[0\] is 1099511627776"),
        ({**parts(), "phase": np.array([[0]])}, r"phase has shape \[1, 1\]"),
        ({**parts(), "embeddings": np.zeros(T, "f4")}, r"embeddings has shape \[6\]; \[T, h\]"),
    ],
)
def test_what_is_wrong_is_named(broken: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        RoutingTrace(**broken)
    np.savez(tmp_path / "broken.npz", allow_pickle=False, **broken)
    with pytest.raises(TraceError, match=r"broken\.npz: "):
        load_trace(tmp_path / "broken.npz")


def test_missing_fields_are_named_with_those_that_belong_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", expert_ids=np.zeros((1, 1, 1), int), num_experts=1)
    with pytest.raises(TraceError, match=r"no weights, seq_start, seq_len; .* holds expert_ids, "):
        load_trace(tmp_path / "trace.npz")


@pytest.mark.parametrize("content", [b"", b"text, not numpy", b"PK\x03\x04 cut off"])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.npz: not an npz archive, or damaged"):
        load_trace(tmp_path / "trace.npz")


def test_no_changed_byte_is_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, RoutingTrace(**parts()))
    whole = path.read_bytes()
    refused = 0
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x3F
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a changed name is unknown to the format
            try:
                load_trace(path)
            except TraceError:
                refused += 1
    assert refused > len(whole) / 14


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, RoutingTrace(**parts()))
    content = bytearray(path.read_bytes())
    content[60:160] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.npz: not an npz archive, or damaged"):
        load_trace(path)


def test_one_bare_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", np.arange(3))
    with pytest.raises(TraceError, match="one bare array"):
        load_trace(tmp_path / "trace.npy")


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", **{**parts(), "weights": np.array([{}], object)})
    with pytest.raises(TraceError, match="not an npz archive, or damaged: Object arrays"):
        load_trace(tmp_path / "trace.npz")


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.npz: cannot be read: No such file"):
        load_trace(tmp_path / "none.npz")
    with pytest.raises(TraceError, match=r"cannot be written: No such file"):
        save_trace(tmp_path / "nowhere" / "trace.npz", RoutingTrace(**parts()))


def test_split_takes_the_first_sequences_to_learn_from() -> None:
    trace = RoutingTrace(
        **{**parts(), "seq_start": np.arange(6), "seq_len": np.ones(6, int), "arrival_s": None}
    )
    learned, measured = trace.split(0.7)
    assert learned == [(0, 1), (1, 1), (2, 1), (3, 1)] and measured == [(4, 1), (5, 1)]
    assert trace.split(0) == ([], trace.sequences())
    with pytest.raises(TraceError, match="split 1 of 6 sequences leaves none to measure"):
        trace.split(1.0)


def test_select_packs_the_chosen_sequences_in_their_order() -> None:
    trace = RoutingTrace(**parts())
    chosen = trace.select([1, 0])
    assert chosen.sequences() == [(0, 2), (2, 4)]
    order = [4, 5, 0, 1, 2, 3]
    for name in ("expert_ids", "weights", "token_ids", "probs", "phase", "embeddings"):
        np.testing.assert_array_equal(getattr(chosen, name), parts()[name][order])
    assert chosen.arrival_s is not None and chosen.arrival_s.tolist() == [1e9 + 0.25, 0.0]
    assert trace.select([]).num_tokens == 0
    with pytest.raises(TraceError, match="no sequence 2; the trace has 2"):
        trace.select([2])
