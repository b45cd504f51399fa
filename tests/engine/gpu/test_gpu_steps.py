"""On a GPU: whatever holds the experts and however a step is launched, the same bits come out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fmoe_ray.config import parse_settings
from fmoe_ray.engine.messages import Row, RowResult, Sampling, StepPlan
from fmoe_ray.engine.step_runner import StepRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
FAMILIES = ["mixtral", "qwen2_moe", "gpt_oss", "olmoe", "phimoe"]
VARIANTS = [
    (1.0, "lru", False),
    (0.5, "lru", True),
    (0.5, "fmoe", True),
    (0.5, "fmoe+", True),
    (0.5, "fmoe+", False),
    (0.25, "fmoe+", True),
    (2, "lru", True),
    (2, "lru", False),
]
"""Budget, policy, CUDA graphs; two slots are the least that a token needs."""
SHOWN = Sampling(temperature=0.0, num_logprobs=5)
PROMPTS = [[5, 9, 17, 2, 40], [7, 7, 30], list(range(3, 63))]


def serve(
    folder: Path, num_prompts: int, *, budget: object, policy: str = "lru", graphs: bool = True
) -> list[list[RowResult]]:
    """Every prompt's answer of 12 tokens, all rows in step after their prompts."""
    runner = StepRunner.load(
        parse_settings(
            {
                "model": {"path": str(folder), "device": "cuda", "dtype": "bfloat16"},
                "offload": {"policy": policy, "budget": budget, "transfer_timeout_s": 20},
                "engine": {"max_batch_size": 4, "max_context": 400, "cuda_graphs": graphs},
            }
        )
    )
    try:
        prompts = PROMPTS[:num_prompts]
        answers: list[list[RowResult]] = [[] for _ in prompts]
        for step in range(12):
            rows = [
                Row(
                    request_id=number,
                    slot=number,
                    start=0 if step == 0 else len(prompt) + step - 1,
                    tokens=prompt if step == 0 else [answers[number][-1].token or 0],
                    samples=True,
                    sampling=SHOWN,
                )
                for number, prompt in enumerate(prompts)
            ]
            result = runner.run(StepPlan(step=step, rows=rows))
            assert result.error is None
            for row, outcome in enumerate(result.rows):
                answers[row].append(outcome)
        runner.check_integrity()
        return answers
    finally:
        runner.shutdown()


def bits(answers: list[list[RowResult]]) -> list[object]:
    return [[(o.token, o.logprob, o.top_logprobs) for o in answer] for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_budget_policy_and_launching_change_no_bit(
    family: str, num_prompts: int, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(family)
    expected = bits(serve(folder, num_prompts, budget=1.0))
    for budget, policy, graphs in VARIANTS:
        got = serve(folder, num_prompts, budget=budget, policy=policy, graphs=graphs)
        assert bits(got) == expected, (budget, policy, graphs)


def test_a_synchronous_and_a_speculative_policy_change_no_bit(
    checkpoint: Callable[[str], Path],
) -> None:
    folder = checkpoint("mixtral")
    expected = bits(serve(folder, 3, budget=1.0))
    for policy in ("deepspeed", "mixtral-offloading", "speculate", "moe-infinity"):
        assert bits(serve(folder, 3, budget=0.5, policy=policy)) == expected, policy


@pytest.mark.parametrize(("policy", "is_captured"), [("fmoe+", True), ("speculate", False)])
def test_only_what_cannot_do_without_the_next_gate_gives_up_the_cuda_graph(
    policy: str,
    is_captured: bool,
    checkpoint: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    serve(checkpoint("mixtral"), 1, budget=0.5, policy=policy)
    assert ("kernel by kernel" not in caplog.text) == is_captured
