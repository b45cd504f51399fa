import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ray.engine.messages import Sampling
from fmoe_ray.engine.sampling import Sampler, distribution

logit_lists = st.lists(st.integers(-60, 60).map(lambda tenth: tenth / 10), min_size=1, max_size=12)
temperatures = st.sampled_from([0.1, 0.7, 1.0, 2.5])
top_ps = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])


def plain_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> dict[int, float]:
    """The definition, token by token."""
    exponentials = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        order = order[:top_k]
    total = sum(exponentials[token] for token in order)
    kept: dict[int, float] = {}
    reached = 0.0
    for token in order:
        if kept and top_p < 1.0 and reached >= top_p:
            break
        kept[token] = exponentials[token] / total
        reached += kept[token]
    total = sum(kept.values())
    return {token: p / total for token, p in kept.items()}


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-200])
@pytest.mark.parametrize("scale", [1e-38, 1.0, 3e38])
def test_a_temperature_near_zero_is_greedy(temperature: float, scale: float) -> None:
    logits = torch.tensor([-1.0, 0.5, 1.0, 0.999]) * scale
    drawn = Sampler(Sampling(temperature=temperature, seed=1)).draw(logits)
    assert drawn.token == 2
    probabilities, _ = distribution(logits, Sampling(temperature=temperature))
    assert probabilities.tolist() == [1.0, 0.0, 0.0, 0.0]


@given(logit_lists, temperatures, st.integers(0, 13), top_ps)
def test_the_distribution_is_that_of_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities, tokens = distribution(torch.tensor(logits, dtype=torch.float64), sampling)
    expected = plain_distribution(logits, temperature, top_k, top_p)
    ours = dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))
    assert sum(ours.values()) == pytest.approx(1.0)
    borderline = abs(len(ours) - len(expected)) == 1  # a sum that reaches top_p by rounding
    assert borderline or ours == pytest.approx(expected)


@given(logit_lists, st.integers(0, 13), top_ps, st.integers(0, 1000))
def test_temperature_zero_takes_the_most_probable_token(
    logits: list[float], top_k: int, top_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=0.0, top_k=top_k, top_p=top_p, seed=seed)
    token = Sampler(sampling).draw(torch.tensor(logits)).token
    assert logits[token] == max(logits)


def draws(sampling: Sampling, logits_V: torch.Tensor, count: int) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.draw(logits_V).token for _ in range(count)]


def test_drawn_tokens_occur_as_often_as_their_probability_says() -> None:
    logits = [2.0, 1.0, 0.0, -1.0, -3.0]
    count = 4000
    sampling = Sampling(temperature=0.8, top_p=0.97, seed=3)
    tokens = draws(sampling, torch.tensor(logits), count)
    for token, p in plain_distribution(logits, 0.8, 0, 0.97).items():
        deviation = math.sqrt(p * (1 - p) / count)
        assert tokens.count(token) / count == pytest.approx(p, abs=5 * deviation)
    assert set(tokens) == set(plain_distribution(logits, 0.8, 0, 0.97))


def test_a_seed_repeats_its_tokens_and_another_does_not() -> None:
    logits = torch.zeros(50)
    assert draws(Sampling(seed=7), logits, 20) == draws(Sampling(seed=7), logits, 20)
    assert draws(Sampling(seed=7), logits, 20) != draws(Sampling(seed=8), logits, 20)


def test_requests_without_a_seed_differ() -> None:
    logits = torch.zeros(50)
    assert draws(Sampling(), logits, 20) != draws(Sampling(), logits, 20)


def test_log_probabilities_are_the_models_own_whatever_the_temperature() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    expected = logits.log_softmax(-1)
    drawn = Sampler(Sampling(temperature=5.0, num_logprobs=2, seed=0)).draw(logits)
    assert drawn.logprob == pytest.approx(float(expected[drawn.token]))
    assert [t.token for t in drawn.top_logprobs] == [1, 2]
    assert drawn.top_logprobs[0].logprob == pytest.approx(float(expected[1]))


def test_log_probabilities_are_reported_only_when_asked_for() -> None:
    logits = torch.tensor([1.0, 3.0])
    unasked = Sampler(Sampling(temperature=0.0)).draw(logits)
    assert (unasked.logprob, unasked.top_logprobs) == (None, [])
    without_others = Sampler(Sampling(temperature=0.0, num_logprobs=0)).draw(logits)
    assert without_others.logprob is not None
    assert without_others.top_logprobs == []
