import json
import multiprocessing
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.loading import StoredExperts, loading, logits
from reference.mxfp4 import save_mxfp4
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fmoe_ray.errors import CheckpointError, UnsupportedModelError
from fmoe_ray.evaluate.tiny_models import EXPERTS, TOP_K, VOCAB, save_tiny
from fmoe_ray.models.experts import bind_experts
from fmoe_ray.models.loader import load_model

FAMILIES = [
    "mixtral",
    "qwen2_moe",
    "phimoe",
    "olmoe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "gemma4_text",
]
CPU = torch.device("cpu")


def reference(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="grouped_mm"
    )
    return logits(model.eval())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    with loading(folder) as loaded:
        bind_experts(loaded.experts.values(), StoredExperts(loaded))
        assert (loaded.num_experts, loaded.top_k) == (EXPERTS, TOP_K)
        torch.testing.assert_close(
            logits(loaded.model), reference(folder, torch.float32), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_a_bfloat16_checkpoint_computes_in_its_own_type_or_in_float32(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path, dtype=torch.bfloat16)
    with loading(folder, None) as loaded:
        assert loaded.dtype == torch.bfloat16
        bind_experts(loaded.experts.values(), StoredExperts(loaded))
        assert torch.equal(logits(loaded.model), reference(folder, torch.bfloat16))
    with loading(folder) as loaded:
        assert loaded.dtype == torch.float32
        bind_experts(loaded.experts.values(), StoredExperts(loaded))
        torch.testing.assert_close(
            logits(loaded.model), reference(folder, torch.float32), atol=1e-5, rtol=0
        )


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path, tie_word_embeddings=True)
    with loading(folder) as loaded:
        assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_only_the_experts_stay_without_weights(tmp_path: Path) -> None:
    with loading(save_tiny("qwen2_moe", tmp_path)) as loaded:
        empty = {name for name, p in loaded.model.named_parameters() if p.is_meta}
        fields = [field.name for field in loaded.layout.fields]
        assert empty == {f"{module}.{name}" for module in loaded.experts for name in fields}
        assert not any(buffer.is_meta for buffer in loaded.model.buffers())


def test_progress_counts_every_expert_once(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    of_its_own = 0.2 + 0.1 * random.random()  # no store of another test run is there already
    loaded = load_model(
        str(save_tiny("mixtral", tmp_path, initializer_range=of_its_own)),
        device=CPU,
        dtype=torch.float32,
        progress=lambda done, total: calls.append((done, total)),
    )
    total = loaded.num_layers * loaded.num_experts
    assert calls == [(done, total) for done in range(1, total + 1)]
    loaded.store.close()


def test_a_store_that_is_there_is_shared_instead_of_loaded_again(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path)
    with loading(folder) as first:
        calls: list[int] = []
        second = load_model(
            str(folder),
            device=CPU,
            dtype=torch.float32,
            progress=lambda done, _: calls.append(done),
        )
        assert calls == []
        assert second.store.name == first.store.name
        for index in range(first.store.num_blobs):
            assert np.array_equal(first.store.blob(index), second.store.blob(index))
        second.store.close()


def test_another_type_gets_another_store(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path)
    with loading(folder) as wide, loading(folder, torch.bfloat16) as narrow:
        assert wide.store.name != narrow.store.name
        assert wide.fingerprint == narrow.fingerprint
        assert wide.store.blob_bytes == 2 * narrow.store.blob_bytes


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path)
    config = folder / "config.json"
    changed = json.loads(config.read_text()) | {"num_local_experts": EXPERTS + 1}
    config.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError):
        load_model(str(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("change", ["lacks", "differs"])
def test_experts_that_do_not_fit_together_are_named_and_leave_no_store(
    change: str, tmp_path: Path
) -> None:
    save_tiny("mixtral", tmp_path)
    path, key = next(
        (path, key)
        for path in sorted(tmp_path.glob("*.safetensors"))
        for key in load_file(path)
        if re.search(r"layers\.1\.\S*experts\.2\.w1\.weight", key)
    )
    tensors = load_file(path)
    whole = tensors.pop(key)
    if change == "differs":
        tensors[key] = whole[:-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    if index.is_file():
        body = json.loads(index.read_text())
        if change == "lacks":
            del body["weight_map"][key]
        index.write_text(json.dumps(body))
    before = set(Path("/dev/shm").glob("fmoe-*"))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\..*gate_up_proj (do not fit|has shape)"
    ) as caught:
        load_model(str(tmp_path), device=CPU, dtype=None)
    assert caught.tb is not None  # its frames know the store, and are alive
    assert set(Path("/dev/shm").glob("fmoe-*")) <= before


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path)
    config = folder / "config.json"
    changed = json.loads(config.read_text()) | {"vocab_size": VOCAB + 1}
    config.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"embed_tokens|lm_head"):
        load_model(str(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("jetmoe", "do not follow transformers' experts interface"),
        ("qwen3_next", "linear_attention"),
        ("lfm2_moe", "conv"),
        ("deepseek_v32", "indexed_attention"),
    ],
)
def test_a_family_that_cannot_run_is_refused_by_name(
    family: str, reason: str, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{family}: .*{reason}"):
        load_model(str(folder), device=CPU, dtype=torch.float32)


def test_a_dense_model_has_nothing_to_offload(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"llama: .*none"):
        load_model(str(folder), device=CPU, dtype=torch.float32)


def _memory_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _measure(folder: Path, sender: Any) -> None:
    """Loads once small to warm the libraries up, then reports (growth at its peak, weights)."""
    torch.set_num_threads(1)
    with loading(folder / "small"):
        pass
    before = _memory_bytes()
    peak = 0

    def watch(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, _memory_bytes() - before)

    loaded = load_model(str(folder / "big"), device=CPU, dtype=torch.float32, progress=watch)
    peak = max(peak, _memory_bytes() - before)
    dense = sum(p.nbytes for p in loaded.model.parameters() if not p.is_meta)
    weights = dense + loaded.store.num_blobs * loaded.store.blob_bytes
    loaded.store.close()
    sender.send((peak, weights))


def save_tiny_mixtral(folder: Path, **sizes: Any) -> Path:
    return save_tiny("mixtral", folder, **sizes)


def save_one_quantised_layer(folder: Path, **sizes: Any) -> Path:
    """So that a layer dequantised at once would double the weights."""
    return save_mxfp4("gpt_oss", folder, num_hidden_layers=1, num_local_experts=32, **sizes)


@pytest.mark.parametrize(
    ("save", "sizes", "margin"),
    [
        pytest.param(
            save_tiny_mixtral,
            {"hidden_size": 512, "intermediate_size": 512},
            20 * 2**20,
            id="76MiB",
        ),
        pytest.param(
            save_one_quantised_layer,
            {"hidden_size": 512, "intermediate_size": 512},
            20 * 2**20,
            id="100MiB-mxfp4",
        ),
        pytest.param(
            save_tiny_mixtral,
            {"hidden_size": 2048, "intermediate_size": 1792},
            20 * 2**20,
            id="1GiB",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_loading_takes_no_more_memory_than_the_weights(
    save: Callable[..., Path], sizes: dict[str, Any], margin: int, tmp_path: Path
) -> None:
    save(tmp_path / "small")
    save(tmp_path / "big", **sizes)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(tmp_path, sender))
    process.start()
    assert receiver.poll(300), "the loading process said nothing for five minutes"
    peak, weights = receiver.recv()
    process.join(60)
    assert peak <= 1.05 * weights + margin
