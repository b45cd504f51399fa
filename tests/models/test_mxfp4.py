import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.loading import StoredExperts, loading, logits
from reference.mxfp4 import save_mxfp4, value
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fmoe_ray.config import parse_settings
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import CheckpointError, UnsupportedModelError
from fmoe_ray.evaluate.drive import Drive
from fmoe_ray.evaluate.families import PROMPT_LENGTHS, generate
from fmoe_ray.evaluate.tiny_models import EXPERTS, LAYERS, TOP_K, VOCAB, save_tiny
from fmoe_ray.models.experts import bind_experts
from fmoe_ray.models.loader import LoadedModel, load_model
from fmoe_ray.models.mxfp4 import dequantise
from fmoe_ray.models.preflight import check_machine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES = ["gpt_oss", "aria_text"]
"""Those of transformers that it can load from MXFP4: weights are [inputs, outputs]."""
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
Tensors = dict[str, torch.Tensor]


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        experts_implementation="grouped_mm",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()


def assert_same_experts(loaded: LoadedModel, model: Any) -> None:
    stored = StoredExperts(loaded)
    for layer, name in enumerate(loaded.experts):
        theirs = dict(model.get_submodule(name).named_parameters(recurse=False))
        for expert in range(loaded.num_experts):
            ours = stored.weights(layer, expert)
            assert set(ours) == set(theirs)
            for field, tensor in ours.items():
                assert tensor.dtype == theirs[field].dtype
                assert torch.equal(tensor, theirs[field][expert]), f"{name}.{field} of {expert}"


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def random_packed(seed: int, *shape: int, scales: range) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator),
        torch.randint(scales.start, scales.stop, shape, dtype=torch.uint8, generator=generator),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_with_every_scale_has_the_value_of_the_format(dtype: torch.dtype) -> None:
    """Scales of 0 and 1 make subnormals, 254 and 255 infinities."""
    blocks_RG16 = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales_RG = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    want = [
        [value(code, scale) for byte in range(256) for code in (byte % 16, byte // 16)]
        for scale in range(256)
    ]
    values = dequantise(blocks_RG16, scales_RG, dtype)
    assert values.dtype == dtype
    expected = torch.tensor(want, dtype=torch.float64).to(dtype)
    assert torch.equal(values, expected)
    assert torch.equal(values.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scales", [range(1), range(254, 255), range(255, 256), range(255)], ids=str
)
def test_values_equal_those_of_transformers_bit_by_bit(scales: range, dtype: torch.dtype) -> None:
    if 255 in scales and torch.ldexp(torch.zeros(1), torch.tensor([128])).isnan():
        pytest.skip("this torch computes 2**128 in float32, so transformers makes NaN of zeros")
    blocks, scale = random_packed(0, 2, 24, 50, scales=scales)
    theirs = convert_moe_packed_tensors(blocks, scale, dtype=dtype)
    for expert in range(2):
        ours = dequantise(blocks[expert], scale[expert], dtype).T
        assert torch.equal(ours, theirs[expert])
        assert torch.equal(ours.signbit(), theirs[expert].signbit())


def test_more_groups_than_are_looked_up_at_once_have_the_same_values() -> None:
    blocks, scales = random_packed(0, 1024, 70, scales=range(100, 150))
    values = dequantise(blocks, scales, torch.bfloat16)
    for row in (0, 935, 936, 937, 1023):  # 2**16 groups end within row 936
        rows = slice(row, row + 1)
        assert torch.equal(values[rows], dequantise(blocks[rows], scales[rows], torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_equal_transformers_own_bit_by_bit(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save_mxfp4(family, tmp_path)
    with loading(folder, dtype) as loaded:
        assert_same_experts(loaded, transformers_model(folder, dtype))


def test_a_square_projection_is_turned_like_any_other(tmp_path: Path) -> None:
    """gpt-oss's down_proj is square: a shape would not tell its two directions apart."""
    folder = save_mxfp4("gpt_oss", tmp_path, intermediate_size=64)
    with loading(folder, torch.bfloat16) as loaded:
        assert_same_experts(loaded, transformers_model(folder, torch.bfloat16))


def test_blocks_and_scales_may_lie_in_different_files(tmp_path: Path) -> None:
    folder = save_mxfp4("gpt_oss", tmp_path, num_files=4)
    with loading(folder, torch.bfloat16) as loaded:
        assert_same_experts(loaded, transformers_model(folder, torch.bfloat16))


def test_a_family_that_keeps_weights_as_outputs_by_inputs_loads_too(tmp_path: Path) -> None:
    folder = save_mxfp4("mixtral", tmp_path)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    with loading(folder) as loaded:
        stored = StoredExperts(loaded)
        for layer, name in enumerate(loaded.experts):
            for field in ("gate_up_proj", "down_proj"):
                blocks = tensors[f"{name}.{field}_blocks"]
                codes = torch.stack([blocks % 16, blocks // 16], dim=-1).flatten(2)
                scales = tensors[f"{name}.{field}_scales"].repeat_interleave(32, dim=2)
                pairs = zip(codes.flatten().tolist(), scales.flatten().tolist(), strict=True)
                want = torch.tensor([value(*pair) for pair in pairs]).view(codes.shape)
                for expert in range(EXPERTS):
                    assert torch.equal(stored.weights(layer, expert)[field], want[expert])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_mxfp4(family, tmp_path)
    with loading(folder) as loaded:
        bind_experts(loaded.experts.values(), StoredExperts(loaded))
        want = logits(transformers_model(folder, torch.float32))
        torch.testing.assert_close(logits(loaded.model), want, atol=1e-5, rtol=0)
    with loading(folder, torch.bfloat16) as loaded:
        bind_experts(loaded.experts.values(), StoredExperts(loaded))
        want = logits(transformers_model(folder, torch.bfloat16))
        assert torch.equal(logits(loaded.model), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_generate(family: str, tmp_path: Path) -> None:
    """In chunks, four at once, with three expert slots, across the sliding window."""
    folder = save_mxfp4(family, tmp_path / "mxfp4")
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]
    settings = {
        "model": {"path": str(folder), "device": "cpu"},
        "offload": {"policy": "lru", "budget": TOP_K + 1},
        "engine": {"max_batch_size": 4, "max_context": 200},
    }
    runner = StepRunner.load(parse_settings(settings))
    tokens = Drive(runner)(prompts, 8)
    runner.check_integrity()
    runner.shutdown()
    plain = tmp_path / "plain"
    transformers_model(folder, torch.float32).save_pretrained(plain)
    assert tokens == generate(plain, prompts, 8)


def test_without_a_named_type_bfloat16_is_kept(tmp_path: Path) -> None:
    folder = save_mxfp4("gpt_oss", tmp_path)
    assert "dtype" not in json.loads((folder / "config.json").read_text())
    with loading(folder, None) as loaded:
        assert loaded.dtype == torch.bfloat16
        assert {field.dtype for field in loaded.layout.fields} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_foreseen_is_that_of_the_dequantised_experts(dtype: str, tmp_path: Path) -> None:
    model = {"path": str(save_mxfp4("gpt_oss", tmp_path)), "device": "cpu", "dtype": dtype}
    needs = check_machine(parse_settings({"model": model}))
    with loading(tmp_path, getattr(torch, dtype)) as loaded:
        assert needs.store_bytes == LAYERS * EXPERTS * loaded.expert_bytes
        assert needs.store_bytes == loaded.store.num_blobs * loaded.store.blob_bytes


def test_the_quantised_and_the_plain_checkpoint_have_stores_of_their_own(tmp_path: Path) -> None:
    quantised = save_mxfp4("gpt_oss", tmp_path / "mxfp4")
    plain = save_tiny("gpt_oss", tmp_path / "plain", torch.bfloat16)
    with loading(quantised, None) as one, loading(plain, None) as other:
        assert one.store.name != other.store.name
        assert one.fingerprint != other.fingerprint


def test_changed_scales_change_the_fingerprint(tmp_path: Path) -> None:
    folder = save_mxfp4("gpt_oss", tmp_path)
    with loading(folder, None) as loaded:
        before = loaded.fingerprint
    edit_tensors(folder, lambda tensors: tensors[f"{GATE_UP}_scales"].add_(1))
    with loading(folder, None) as loaded:
        assert loaded.fingerprint != before


def cut(name: str, *index: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][index]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{GATE_UP}_scales"), r"gate_up_proj_blocks is there without .*_scales"),
        (lambda t: t.pop(f"{GATE_UP}_blocks"), r"gate_up_proj_scales is there without .*_blocks"),
        (
            lambda t: (t.pop(f"{GATE_UP}_scales"), t.pop(f"{GATE_UP}_blocks")),
            r"no tensors for model\.layers\.1\.mlp\.experts\.gate_up_proj",
        ),
        (cut(f"{GATE_UP}_blocks", slice(7)), r"shape \(7, 64, 2, 16\) and .* \(8, 64, 2\) do not"),
        (cut(f"{GATE_UP}_blocks", ..., slice(8)), r"\(8, 64, 2, 8\) and .* do not belong"),
        (cut(f"{GATE_UP}_blocks", ..., 0), r"\(8, 64, 2\) and .* do not belong"),
        (cut(f"{GATE_UP}_scales", ..., slice(1)), r"scales of shape \(8, 64, 1\) do not belong"),
        (
            lambda t: [cut(f"{GATE_UP}{end}", slice(7))(t) for end in ("_blocks", "_scales")],
            r"gate_up_proj in MXFP4 has shape \(7, 64, 64\), \(8, 64, 64\) expected",
        ),
        (
            lambda t: [
                cut(f"{GATE_UP}{end}", slice(None), slice(63))(t) for end in ("_blocks", "_scales")
            ],
            r"gate_up_proj in MXFP4 has shape \(8, 64, 63\), \(8, 64, 64\) expected",
        ),
        (
            lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].view(torch.int8)}),
            r"gate_up_proj_blocks is stored as I8, U8 expected",
        ),
        (
            lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"].bfloat16()}),
            r"gate_up_proj_scales is stored as BF16, U8 expected",
        ),
        (
            lambda t: t.update({GATE_UP: torch.zeros(8, 64, 64)}),
            r"gate_up_proj is stored twice",
        ),
    ],
)
def test_damage_is_named(change: Callable[[Tensors], object], words: str, tmp_path: Path) -> None:
    folder = save_mxfp4("gpt_oss", tmp_path)
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=words):
        load_model(str(folder), device=torch.device("cpu"), dtype=torch.float32)


def test_experts_stored_one_by_one_are_refused(tmp_path: Path) -> None:
    folder = save_mxfp4("mixtral", tmp_path)

    def split(tensors: Tensors) -> None:
        for end in ("_blocks", "_scales"):
            down = tensors.pop(f"model.layers.0.mlp.experts.down_proj{end}")
            for expert in range(EXPERTS):
                name = f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight{end}"
                tensors[name] = down[expert]

    edit_tensors(folder, split)
    with pytest.raises(UnsupportedModelError, match=r"w2\.weight_blocks: MXFP4 is supported where"):
        load_model(str(folder), device=torch.device("cpu"), dtype=torch.float32)


def test_a_file_cut_within_the_blocks_is_named(tmp_path: Path) -> None:
    (path,) = save_mxfp4("gpt_oss", tmp_path).glob("*.safetensors")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{size} bytes expected, {size - 100} found"):
        load_model(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
