import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects

from fmoe_ray.errors import CheckpointError, CheckpointNotFoundError, UnsupportedModelError
from fmoe_ray.evaluate.tiny_models import save_tiny
from fmoe_ray.models.checkpoint import open_checkpoint, resolve


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def copy(mixtral: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixtral, tmp_path / "copy"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_whole_checkpoint_opens_with_every_tensor_of_the_index(mixtral: Path) -> None:
    checkpoint = open_checkpoint(mixtral)
    index = json.loads((mixtral / "model.safetensors.index.json").read_text())
    assert set(checkpoint.tensors) == set(index["weight_map"])
    stored = sum(entry.end - entry.start for entry in checkpoint.tensors.values())
    assert stored == index["metadata"]["total_size"]
    assert len(checkpoint.files) == len(shards(mixtral)) > 1
    assert checkpoint.config["model_type"] == "mixtral"


def test_a_truncated_shard_is_refused_with_both_sizes(copy: Path) -> None:
    shard = shards(copy)[1]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{shard.name}: {size} bytes expected, {size - 10}"):
        open_checkpoint(copy)


def test_a_shard_cut_within_its_header_is_refused(copy: Path) -> None:
    shard = shards(copy)[0]
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=f"{shard.name}: damaged safetensors header"):
        open_checkpoint(copy)


def write_header(shard: Path, header: object) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text)


TENSOR = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        3,
        b"\xff\xff",
        b"[" * 100_000,
        {"a": 3},
        {"a": []},
        {"a": {}},
        {"a": TENSOR | {"dtype": []}},
        {"a": TENSOR | {"shape": 3}},
        {"a": TENSOR | {"shape": ["x"]}},
        {"a": TENSOR | {"data_offsets": "ab"}},
        {"a": TENSOR | {"data_offsets": [0]}},
        {"a": TENSOR | {"data_offsets": [4, 0]}},
        {"a": TENSOR | {"data_offsets": [-8, 0]}},
        {"a": TENSOR | {"data_offsets": [0.5, 1.5]}},
    ],
    ids=repr,
)
def test_a_header_that_describes_no_tensors_is_refused(copy: Path, header: object) -> None:
    shard = shards(copy)[0]
    write_header(shard, header)
    with pytest.raises(CheckpointError, match=r"damaged safetensors header"):
        open_checkpoint(copy)


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard = shards(copy)[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}.*missing"):
        open_checkpoint(copy)


def test_a_tensor_that_its_shard_does_not_hold_is_named(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.ghost"] = shards(copy)[0].name
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"model\.ghost"):
        open_checkpoint(copy)


def test_an_index_may_not_point_outside_its_folder(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../other/model.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        open_checkpoint(copy)


@pytest.mark.parametrize("weight_map", [3, {}, {"x": 3}, {"x": None}, {"x": ["a"]}])
def test_an_index_without_file_names_is_refused(copy: Path, weight_map: object) -> None:
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"no weight_map|outside the folder"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickled_checkpoint_is_refused_with_the_reason(copy: Path, name: str) -> None:
    for path in [*shards(copy), copy / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({"x": torch.zeros(1)}, copy / name)
    with pytest.raises(CheckpointError, match="pickle can run any code"):
        open_checkpoint(copy)


def test_a_folder_without_weights_is_refused(copy: Path) -> None:
    for path in [*shards(copy), copy / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(copy)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_an_unreadable_configuration_is_refused(copy: Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: not readable"):
        open_checkpoint(copy)


def test_a_folder_without_configuration_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("section", ["", "text_config"])
def test_quantised_weights_are_refused_by_name_and_the_supported_ones_are_named(
    copy: Path, section: str
) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    edit_config(copy, **({section: quantised} if section else quantised))
    with pytest.raises(UnsupportedModelError, match=r"with FP8, .*only MXFP4 is"):
        open_checkpoint(copy)


def test_a_quantisation_that_names_no_method_is_refused(copy: Path) -> None:
    edit_config(copy, text_config=3, quantization_config="fp8")
    with pytest.raises(UnsupportedModelError, match="UNKNOWN"):
        open_checkpoint(copy)


def test_the_fingerprint_is_of_the_content_not_of_the_place(mixtral: Path, copy: Path) -> None:
    assert open_checkpoint(copy).fingerprint == open_checkpoint(mixtral).fingerprint


def test_one_changed_tensor_changes_the_fingerprint(copy: Path) -> None:
    checkpoint = open_checkpoint(copy)
    before = checkpoint.fingerprint
    entry = checkpoint.tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    shard = copy / entry.file
    content = bytearray(shard.read_bytes())
    content[entry.start : entry.end] = bytes(entry.end - entry.start)
    shard.write_bytes(content)
    assert open_checkpoint(copy).fingerprint != before


def test_a_changed_configuration_changes_the_fingerprint(copy: Path) -> None:
    before = open_checkpoint(copy).fingerprint
    edit_config(copy, rms_norm_eps=1e-3)
    assert open_checkpoint(copy).fingerprint != before


def test_a_name_that_is_neither_folder_nor_hub_name_is_not_found() -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither a folder here nor a hub name"):
        resolve("no/such/folder")


def test_a_file_is_no_checkpoint(mixtral: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        resolve(str(mixtral / "config.json"))


def test_a_download_leaves_out_the_same_weights_for_other_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    foreign = ["original/model.safetensors", "original/a/b.safetensors", "metal/model.bin"]
    downloaded: list[str] = []

    def snapshot_download(
        name: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        downloaded.extend(
            filter_repo_objects(
                [*wanted, *foreign],
                allow_patterns=allow_patterns,
                ignore_patterns=ignore_patterns,
            )
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("somebody/something") == tmp_path
    assert downloaded == wanted


def test_a_hub_name_without_a_network_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="hf download nobody/nothing"):
        resolve("nobody/nothing")
