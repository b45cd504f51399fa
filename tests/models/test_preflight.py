import re
from pathlib import Path

import pytest
import torch

from fmoe_ray.config import Settings, load_settings, parse_settings
from fmoe_ray.engine.packed_model import PackedModel
from fmoe_ray.errors import (
    CapacityError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedModelError,
)
from fmoe_ray.evaluate.tiny_models import EXPERTS, LAYERS, TOP_K, save_tiny, tiny_config
from fmoe_ray.models.architecture import architecture_of, build_architecture
from fmoe_ray.models.loader import load_model
from fmoe_ray.models.preflight import check_machine, needs_of

MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
MIXTRAL_8X7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def settings(path: object, **offload: object) -> Settings:
    model = {"path": str(path), "device": "cpu"}
    return parse_settings({"model": model, "offload": offload})


def test_mixtral_8x7b_needs_its_known_sizes() -> None:
    """46.7 billion parameters, 45.1 of them experts (Mixtral paper, table 1)."""
    architecture = architecture_of(tiny_config("mixtral", **MIXTRAL_8X7B), torch.bfloat16)
    needs = needs_of(architecture, settings("x", budget=0.25), torch.device("cuda"))
    assert needs.store_bytes == 2 * 256 * 3 * 4096 * 14336
    assert (needs.store_bytes + needs.dense_bytes) / 2e9 == pytest.approx(46.7, abs=0.05)
    assert needs.slot_bytes == needs.store_bytes // 4
    assert needs.host_bytes == needs.store_bytes
    # 2 x 8 heads of 128 in 32 layers (config.json); the default of 16 requests, 512 tokens each.
    assert needs.kv_bytes == 2 * 32 * 2 * 8 * 128 * 16 * 512
    assert needs.device_bytes == needs.dense_bytes + needs.slot_bytes + needs.kv_bytes


def test_on_a_cpu_slots_and_dense_weights_are_host_memory_too(tmp_path: Path) -> None:
    needs = check_machine(settings(save_tiny("mixtral", tmp_path), budget=2))
    assert needs.slot_bytes * LAYERS * EXPERTS == needs.store_bytes * 2
    device_bytes = needs.dense_bytes + needs.slot_bytes + needs.kv_bytes
    assert needs.host_bytes == needs.store_bytes + device_bytes
    assert needs.device_bytes == 0


def test_a_store_that_is_there_is_not_needed_a_second_time(tmp_path: Path) -> None:
    """A second replica on the node, or a restart after a kill -9."""
    asked = settings(save_tiny("mixtral", tmp_path), budget=2)
    first = check_machine(asked)
    loaded = load_model(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    with loaded.store:
        second = check_machine(asked)
    assert second.new_store_bytes == 0 < first.new_store_bytes
    assert first.host_bytes - second.host_bytes == first.store_bytes
    assert check_machine(asked) == first


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma4_text"])
def test_keys_and_values_take_what_was_foreseen(family: str, tmp_path: Path) -> None:
    engine = {"max_batch_size": 3, "max_context": 20}
    model = {"path": str(save_tiny(family, tmp_path)), "device": "cpu", "dtype": "float32"}
    needs = check_machine(parse_settings({"model": model, "engine": engine}))
    loaded = load_model(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    with loaded.store:
        packed = PackedModel(loaded.model, num_slots=3, max_context=20, device=loaded.device)
        packed.warm_up()
        assert needs.kv_bytes == packed.kv_bytes > 0


def test_a_context_that_fits_nowhere_is_refused_before_loading(tmp_path: Path) -> None:
    path = save_tiny("mixtral", tmp_path)
    engine = {"max_batch_size": 2**30, "max_context": 512}
    with pytest.raises(CapacityError, match=r"keys and values \(engine.max_batch_size"):
        check_machine(parse_settings({"model": {"path": str(path)}, "engine": engine}))


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"policy": "clairvoyant"}, r"'clairvoyant' is unknown; choose one of .*lru"),
        ({"budget": TOP_K - 1}, f"a token needs {TOP_K} at once"),
        ({"policy": "no-offload", "budget": 0.5}, "no-offload keeps all"),
        ({"policy": "lru", "prefetch_distance": 3}, "offload.prefetch_distance.*policy lru"),
        ({"record_path": "/proc/trace.npz"}, "offload.record_path .*no file can be written"),
        ({"record_path": "/absent/trace.npz"}, "offload.record_path .*there is no folder /absent"),
        ({"store_path": "/tmp"}, "offload.store_path /tmp: is a folder"),
    ],
)
def test_what_cannot_run_is_refused_before_loading(
    offload: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_machine(settings(save_tiny("mixtral", tmp_path), **offload))


def test_more_threads_than_processors_are_refused(tmp_path: Path) -> None:
    wanted = settings(save_tiny("mixtral", tmp_path))
    engine = wanted.engine.model_copy(update={"num_threads": 10_000})
    with pytest.raises(ConfigError, match="num_threads 10000: this machine has"):
        check_machine(wanted.model_copy(update={"engine": engine}))


def test_a_model_too_big_for_the_machine_names_both_sizes(tmp_path: Path) -> None:
    tiny_config("mixtral", **{**MIXTRAL_8X7B, "num_hidden_layers": 3200}).save_pretrained(tmp_path)
    save_tiny("mixtral", tmp_path / "weights")
    for shard in (tmp_path / "weights").glob("model*"):
        shard.rename(tmp_path / shard.name)
    with pytest.raises(
        CapacityError, match=r"lacks \d+\.\d GiB of host memory \(\d+\.\d GiB available"
    ):
        check_machine(settings(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_config("mixtral").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="download the weights"):
        check_machine(settings(tmp_path))


def test_a_family_that_cannot_run_is_refused(tmp_path: Path) -> None:
    tiny_config("qwen3_next").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        check_machine(settings(tmp_path))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network, and the returned folder as hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_name_that_is_not_here_says_what_is_missing(offline: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"lacks the checkpoint.*Available: "):
        check_machine(settings(MIXTRAL))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_everything_that_is_missing_is_told_at_once(offline: Path) -> None:
    """Mixtral's configuration is in the cache, its weights and a GPU are not here."""
    cache = offline / "models--mistralai--Mixtral-8x7B-v0.1"
    snapshot = cache / "snapshots" / ("0" * 40)
    tiny_config("mixtral", **MIXTRAL_8X7B).save_pretrained(snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    model = {"path": MIXTRAL, "device": "cuda", "dtype": "bfloat16"}
    with pytest.raises(CheckpointNotFoundError) as caught:
        check_machine(parse_settings({"model": model}))
    text = str(caught.value)
    assert f"the weights (fetch them: `hf download {MIXTRAL}`)" in text
    assert "an NVIDIA GPU" in text
    assert "It needs 84.0 GiB of host memory and 4.6 GiB of GPU memory, 1.0 GiB a device" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_alone_is_a_wrong_setting(tmp_path: Path) -> None:
    model = {"path": str(save_tiny("mixtral", tmp_path)), "device": "cuda"}
    with pytest.raises(ConfigError, match="lacks an NVIDIA GPU"):
        check_machine(parse_settings({"model": model}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("name", "memory"), [("mixtral", "84.0"), ("gpt-oss-20b", "35.6")])
def test_the_memory_of_a_shipped_configuration_is_known_without_a_network(
    name: str, memory: str, offline: Path
) -> None:
    shipped = load_settings(Path(__file__).parents[2] / "configs" / f"{name}.yaml")
    with pytest.raises(
        CheckpointNotFoundError, match=f"It needs {re.escape(memory)} GiB of host memory"
    ):
        check_machine(shipped)


def test_without_a_type_the_architecture_of_gpt_oss_is_bfloat16() -> None:
    """20.9 billion parameters, 19.1 of them experts (gpt-oss model card, table 1), which are
    stored in four bits and take two bytes each in the host store.
    """
    architectures = Path(__file__).parents[2] / "fmoe_ray" / "assets" / "architectures"
    architecture = build_architecture(architectures / "openai" / "gpt-oss-20b", None)
    needs = needs_of(architecture, settings("x", budget=0.25), torch.device("cuda"))
    assert (needs.store_bytes + needs.dense_bytes) / 2e9 == pytest.approx(20.9, abs=0.05)
    assert needs.store_bytes / 2e9 == pytest.approx(19.1, abs=0.05)
