from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate import engine_bench
from fmoe_ray.evaluate.shapes import SHAPES, make_model
from fmoe_ray.models.loader import LoadedModel

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


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_shape_has_every_dense_weight_and_every_blob(shape: str) -> None:
    small = dict(SMALL, head_dim=16) if "head_dim" in SHAPES[shape][1] else SMALL
    model = make_model(shape, torch.device("cpu"), torch.bfloat16, overrides=small)
    experts = {f"{name}.{field.name}" for name in model.experts for field in model.layout.fields}
    metas = {name for name, weight in model.model.named_parameters() if weight.is_meta}
    assert metas == experts
    assert not any(buffer.is_meta for buffer in model.model.buffers())
    last = torch.from_numpy(model.store.blob(model.store.num_blobs - 1).copy()).view(torch.bfloat16)
    assert 0.01 < float(last.float().std()) < 0.03
    model.store.close()


def test_a_report_holds_its_own_limits(loaded: LoadedModel) -> None:
    load = engine_bench.Load(budget="0.25", batch=2, prompt_tokens=8, warm_steps=1, steps=3)
    ceilings = engine_bench.Ceilings(link_gbps=2.0, memory_gbps=10.0)
    (report,) = engine_bench.run(loaded, "small", [load], ceilings)
    assert report.bytes.on_demand > 0
    transfer_ms = report.bytes.on_demand / 2.0e9 * 1e3
    assert report.serial_limit_ms == pytest.approx(report.resident_step_ms + transfer_ms)
    assert report.overlapped_limit_ms == max(report.resident_step_ms, transfer_ms)
    assert report.tpot_over_serial == pytest.approx(report.tpot_ms_mean / report.serial_limit_ms)
    assert 0 <= report.hit_rate < 1
    assert report.expert_slots == 30


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"mixtral-8x7b"):
        make_model("gpt-7", torch.device("cpu"), torch.bfloat16)
