"""On a GPU, the demonstration model in bfloat16 says what transformers says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import fmoe_ray
from fmoe_ray.config import parse_settings
from fmoe_ray.engine.model_tokenizer import ModelTokenizer
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.engine.tokenizer import Tokenizer
from fmoe_ray.evaluate.drive import Drive
from fmoe_ray.models.checkpoint import resolve
from fmoe_ray.trace.prompts import read_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PROMPTS = Path(fmoe_ray.__file__).parent / "assets" / "prompts" / "prompts.jsonl"
NUM_TOKENS = 24
LONGEST_PROMPT = 400


def shipped_prompts() -> list[list[int]]:
    tokenizer: Tokenizer = ModelTokenizer.load("tiny")
    return [
        tokenizer.encode_chat([{"role": role, "content": text} for role, text in prompt.messages])[
            -LONGEST_PROMPT:
        ]
        for prompt in read_prompts(PROMPTS)
    ]


def answers(prompts: list[list[int]], device: str) -> list[list[int]]:
    runner = StepRunner.load(
        parse_settings(
            {
                "model": {"path": "tiny", "device": device, "dtype": "bfloat16"},
                "offload": {"policy": "fmoe+", "budget": 0.5, "transfer_timeout_s": 20},
                "engine": {"max_batch_size": 16, "max_context": LONGEST_PROMPT + NUM_TOKENS},
            }
        )
    )
    try:
        eos = ModelTokenizer.load("tiny").eos_token_ids
        outputs = Drive(runner, chunk=LONGEST_PROMPT, eos=eos)(prompts, NUM_TOKENS)
        runner.check_integrity()
        return outputs
    finally:
        runner.shutdown()


class Reference:
    """transformers' own forward pass over a prompt and an answer, in bfloat16 and in float32."""

    def __init__(self, device: str) -> None:
        self._rounded = self._load(device, torch.bfloat16)
        self._exact = self._load(device, torch.float32)

    @staticmethod
    def _load(device: str, dtype: torch.dtype) -> torch.nn.Module:
        # float32 of the same rounded weights: only the arithmetic differs
        model = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.bfloat16)
        loaded: torch.nn.Module = model.to(device, dtype).eval()
        return loaded

    @torch.inference_mode()
    def first_difference(self, prompt: list[int], answer: list[int]) -> tuple[float, float] | None:
        """Where transformers' greedy tokens first leave the answer: by how much it prefers its own
        token, and how far rounding alone moves its logits there. None: the same tokens.
        """
        device = next(self._rounded.parameters()).device
        tokens = torch.tensor([prompt + answer[:-1]], device=device)
        rounded_TV, exact_TV = (
            model(input_ids=tokens).logits[0, len(prompt) - 1 :].float()
            for model in (self._rounded, self._exact)
        )
        chosen_T = torch.tensor(answer, device=device)
        different = (rounded_TV.argmax(-1) != chosen_T).nonzero().flatten().tolist()
        if not different:
            return None
        at = different[0]
        margin = rounded_TV[at].max() - rounded_TV[at, chosen_T[at]]
        rounding = (rounded_TV[at] - exact_TV[at]).abs().max()
        return float(margin), float(rounding)


def test_greedy_tokens_are_those_of_transformers_up_to_rounding() -> None:
    prompts = shipped_prompts()
    reference = Reference("cuda")
    found = [
        reference.first_difference(prompt, answer)
        for prompt, answer in zip(prompts, answers(prompts, "cuda"), strict=True)
    ]
    differences = [difference for difference in found if difference is not None]
    print(f"{len(prompts) - len(differences)} of {len(prompts)} answers equal; (margin, rounding):")
    print(differences)
    assert len(prompts) == 64
    assert len(differences) <= 0.05 * len(prompts)
    # Two ways of computing, each that far off: a wider margin would be a mistake, not rounding.
    assert all(margin <= 2 * rounding for margin, rounding in differences)
