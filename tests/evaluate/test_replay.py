"""Routing imposed on a model: what is drawn, what is recorded, and who has seen what."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate import replay
from fmoe_ray.evaluate.shapes import make_model
from fmoe_ray.models.loader import LoadedModel
from fmoe_ray.trace.format import RoutingTrace, save_trace

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@pytest.fixture
def loaded() -> Iterator[LoadedModel]:
    model = make_model("qwen1.5-moe", torch.device("cpu"), torch.bfloat16, overrides=SMALL)
    yield model
    model.store.close()


def test_uniform_routing_chooses_distinct_experts_and_repeats_itself(loaded: LoadedModel) -> None:
    routing = replay.open_routing("uniform", loaded, seed=1)
    assert routing is not None
    draw = routing.experts
    ids = draw(3, 7)
    assert ids.shape == (2, 4)
    assert all(len(set(row)) == 4 and max(row) < 60 for row in ids.tolist())
    assert np.array_equal(ids, draw(3, 7))


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, RoutingTrace]:
    random = np.random.default_rng(0)
    num_sequences, length = replay.SEEN_SEQUENCES + 3, 5
    tokens = num_sequences * length
    ids = random.random((tokens, 2, 60)).argpartition(4, -1)[:, :, :4].astype(np.uint8)
    trace = RoutingTrace(
        expert_ids=ids,
        weights=np.full(ids.shape, 0.25, np.float16),
        seq_start=np.arange(num_sequences) * length,
        seq_len=np.full(num_sequences, length),
        num_experts=60,
        token_ids=np.arange(tokens, dtype=np.int32),
    )
    save_trace(tmp_path / "trace.npz", trace)
    return tmp_path / "trace.npz", trace


def test_rows_are_recorded_tokens_that_no_policy_has_seen(
    recorded: tuple[Path, RoutingTrace], loaded: LoadedModel
) -> None:
    path, trace = recorded
    routing = replay.open_routing(str(path), loaded, seed=0)
    assert routing is not None and routing.token is not None and routing.seen is not None
    timed = [routing.token(row, position) for row in range(3) for position in range(5)]
    for row in range(3):
        for position in range(5):
            token = routing.token(row, position)
            assert np.array_equal(routing.experts(row, position), trace.expert_ids[token])
    assert routing.seen.token_ids is not None
    assert sorted([*timed, *routing.seen.token_ids.tolist()]) == list(range(trace.num_tokens))


def test_what_was_seen_has_the_models_own_embeddings(
    recorded: tuple[Path, RoutingTrace], loaded: LoadedModel
) -> None:
    routing = replay.open_routing(str(recorded[0]), loaded, seed=0)
    assert routing is not None and routing.seen is not None
    seen = routing.seen
    assert seen.embeddings is not None and seen.token_ids is not None
    own = loaded.model.get_input_embeddings().weight[seen.token_ids[7]].detach()
    assert np.array_equal(seen.embeddings[7], own.to(torch.float16).numpy())


def test_a_trace_of_another_geometry_is_refused(
    recorded: tuple[Path, RoutingTrace], loaded: LoadedModel
) -> None:
    other = make_model(
        "qwen1.5-moe", torch.device("cpu"), torch.bfloat16, overrides=dict(SMALL, num_experts=30)
    )
    with pytest.raises(ConfigError, match="30"):
        replay.open_routing(str(recorded[0]), other, seed=0)
    other.store.close()
