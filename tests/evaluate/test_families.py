from pathlib import Path

import pytest

from fmoe_ray.errors import EngineError
from fmoe_ray.evaluate.families import FAMILIES, Outcome, survey, table, try_family

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize(
    "family", ["glm4_moe_lite", "gemma4_text", "mimo_v2_flash", "minimax_m2", "hunyuan_v1_moe"]
)
def test_a_family_of_another_kind_gives_transformers_tokens(family: str) -> None:
    """Latent attention, parallel dense layer, sinks, a bias on the block, shared experts."""
    outcome = try_family(family)
    assert (outcome.is_equal, outcome.refusal) == (True, "")


def test_a_refused_family_is_listed_with_its_message() -> None:
    outcome = try_family("jetmoe")
    assert outcome.refusal in table([outcome])
    assert "## 1 are refused" in table([outcome])


def test_a_family_with_other_tokens_would_be_shown() -> None:
    assert "| x | softmax | 3 | NO |" in table(
        [Outcome(family="x", rule="softmax", num_moe_layers=3)]
    )


@pytest.mark.slow
def test_the_table_in_the_documentation_is_what_the_survey_finds() -> None:
    outcomes = survey()
    assert len(outcomes) == len(FAMILIES)
    assert all(outcome.is_equal or outcome.refusal for outcome in outcomes)
    assert DOCUMENT.read_text(encoding="utf-8") == table(outcomes)


def test_a_family_that_fails_leaves_no_runner_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe_ray.evaluate.families.PROMPT_LENGTHS", (500,))
    with pytest.raises(AssertionError, match="of 200") as failed:
        try_family("mixtral")
    frames = [entry.frame.f_locals for entry in failed.traceback]
    runner = next(local["runner"] for local in frames if "runner" in local)
    with pytest.raises(EngineError, match="used after close"):
        runner.counters()
