"""On a GPU, the demonstration model says what transformers says, up to rounding."""

from pathlib import Path
from typing import Any

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


def answers(prompts: list[list[int]], device: str, dtype: str) -> list[list[int]]:
    runner = StepRunner.load(
        parse_settings(
            {
                "model": {"path": "tiny", "device": device, "dtype": dtype},
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
    """transformers in a type, and with the same weights in a finer one: how far rounding alone
    moves the logits.
    """

    def __init__(self, device: str, dtype: str) -> None:
        finer = {"bfloat16": torch.float32, "float32": torch.float64}
        self._device = device
        self._rounded = self._load(getattr(torch, dtype), getattr(torch, dtype))
        self._exact = self._load(getattr(torch, dtype), finer[dtype])

    def _load(self, weights: torch.dtype, arithmetic: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            resolve("tiny"), dtype=weights, experts_implementation="eager"
        )
        return model.to(self._device, arithmetic).eval()

    @torch.inference_mode()
    def answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy, token by token with transformers' cache."""
        tokens: list[int] = []
        given, cache = prompt, None
        for _ in range(num_tokens):
            output = self._rounded(
                input_ids=torch.tensor([given], device=self._device), cache=cache, use_cache=True
            )
            cache = output.cache
            given = [int(output.logits[0, -1].argmax())]
            tokens += given
        return tokens

    @torch.inference_mode()
    def first_difference(self, prompt: list[int], answer: list[int]) -> tuple[float, float] | None:
        """Where the greedy choice of one forward pass over all first leaves the answer: by how much
        it prefers its own token, and the most that rounding moves a logit in this text. None: the
        same tokens.
        """
        tokens = torch.tensor([prompt + answer[:-1]], device=self._device)
        rounded_TV, exact_TV = (
            model(input_ids=tokens).logits[0, len(prompt) - 1 :].double()
            for model in (self._rounded, self._exact)
        )
        chosen_T = torch.tensor(answer, device=self._device)
        different = (rounded_TV.argmax(-1) != chosen_T).nonzero().flatten().tolist()
        if not different:
            return None
        at = different[0]
        margin = rounded_TV[at].max() - rounded_TV[at, chosen_T[at]]
        return float(margin), float((rounded_TV - exact_TV).abs().max())

    def differences(
        self, prompts: list[list[int]], answers: list[list[int]]
    ) -> list[tuple[float, float]]:
        pairs = zip(prompts, answers, strict=True)
        found = [self.first_difference(prompt, answer) for prompt, answer in pairs]
        return [difference for difference in found if difference is not None]


def test_greedy_tokens_in_float32_are_those_of_transformers() -> None:
    prompts = shipped_prompts()
    ours = Reference("cuda", "float32").differences(prompts, answers(prompts, "cuda", "float32"))
    print(f"{len(prompts) - len(ours)} of {len(prompts)} answers equal; (margin, rounding): {ours}")
    assert len(ours) <= 0.05 * len(prompts)
    assert all(margin <= 1e-2 for margin, _ in ours)


def test_in_bfloat16_we_differ_from_transformers_as_it_does_from_itself() -> None:
    """Near ties are many: logits have 8 bits, and a tie in a gate chooses other experts."""
    prompts = shipped_prompts()
    reference = Reference("cuda", "bfloat16")
    decoded = answers(prompts, "cuda", "bfloat16")
    ours = reference.differences(prompts, decoded)
    theirs = reference.differences(
        prompts,
        [reference.answer(p, len(a)) for p, a in zip(prompts, decoded, strict=True)],
    )
    print(f"of {len(prompts)} answers {len(ours)} differ, transformers' own {len(theirs)}: {ours}")
    assert len(ours) <= len(theirs) + 0.1 * len(prompts)
    assert all(margin <= 2 * rounding for margin, rounding in ours)
