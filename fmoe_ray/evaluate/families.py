"""Which model families load and run here, found out by trying: a tiny random model of each, its
greedy tokens compared with transformers' own generate.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fmoe_ray.config import Budget, EngineSettings, ModelSettings, OffloadSettings, Settings
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import UnsupportedModelError
from fmoe_ray.evaluate.drive import Drive
from fmoe_ray.evaluate.tiny_models import LAYERS, TOP_K, VOCAB, save_tiny

FAMILIES = (
    *("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "doge", "dots1"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_text", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "jamba"),
    *("jetmoe", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4_text"),
    *("longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral"),
    *("nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"),
    *("qwen3_next", "solar_open", "zaya"),
)
PROMPT_LENGTHS = (3, 90, 17, 40, 1, 33)
NUM_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`refusal` says why a family does not run; otherwise its tokens were compared."""

    family: str
    rule: str = ""
    num_moe_layers: int = 0
    is_equal: bool = False
    refusal: str = ""


def survey(families: tuple[str, ...] = FAMILIES) -> list[Outcome]:
    """About half a second a family."""
    return [try_family(family) for family in families]


def try_family(family: str) -> Outcome:
    """Prompts across chunks and sliding windows, four requests at once, K + 1 expert slots."""
    with tempfile.TemporaryDirectory(prefix="fmoe-family-") as folder:
        path = save_tiny(family, Path(folder))
        settings = Settings(
            model=ModelSettings(path=folder, device="cpu", dtype="float32"),
            offload=OffloadSettings(policy="lru", budget=Budget(num_experts=TOP_K + 1)),
            engine=EngineSettings(max_batch_size=4, max_context=200),
        )
        try:
            runner = StepRunner.load(settings)
        except UnsupportedModelError as error:
            return Outcome(family=family, refusal=str(error).removeprefix(f"{family}: "))
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            for length in PROMPT_LENGTHS
        ]
        try:
            tokens = Drive(runner)(prompts, NUM_TOKENS)
        finally:
            runner.shutdown()
        return Outcome(
            family=family,
            rule=runner.gate_rule,
            num_moe_layers=runner.info.num_layers,
            is_equal=tokens == generate(path, prompts, NUM_TOKENS),
        )


def generate(path: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens by transformers' own generate, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="grouped_mm"
    ).eval()
    model.generation_config.eos_token_id = None
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    outputs = [model.generate(torch.tensor([p]), generation_config=config) for p in prompts]
    return [o[0, len(p) :].tolist() for o, p in zip(outputs, prompts, strict=True)]


def table(outcomes: list[Outcome]) -> str:
    """docs/families.md"""
    runs = [o for o in outcomes if not o.refusal]
    refused = [o for o in outcomes if o.refusal]
    return "\n".join(
        [
            "# Model families",
            "",
            "Written by `fmoe bench families --write docs/families.md`, which loads a tiny random",
            f"model of each family ({LAYERS} layers), serves {len(PROMPT_LENGTHS)} prompts four at "
            f"a time with {TOP_K + 1} expert slots",
            "and compares the greedy tokens with transformers' `generate`. No family has code of",
            "its own; the gate rule is how a router's output becomes a distribution over experts.",
            "",
            f"## {len(runs)} run",
            "",
            "| family (`model_type`) | gate rule | MoE layers tried | tokens equal `generate` |",
            "|---|---|---|---|",
            *(
                f"| {o.family} | {o.rule} | {o.num_moe_layers} | {'yes' if o.is_equal else 'NO'} |"
                for o in runs
            ),
            "",
            f"## {len(refused)} are refused when loaded",
            "",
            "| family (`model_type`) | message |",
            "|---|---|",
            *(f"| {o.family} | {o.refusal} |" for o in refused),
            "",
            "Experts in MXFP4, a layer's in one pair of tensors (`..._blocks`, `..._scales`), load",
            "for every family. Checkpoints quantised otherwise and pickled ones are refused.",
            "Encoder-decoder models and families outside this list have not been tried.",
            "",
        ]
    )
