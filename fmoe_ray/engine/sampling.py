"""From a row's logits to its next token. Each request draws from its own random stream, so its
tokens do not depend on who shares its steps.
"""

from dataclasses import dataclass

import torch

from fmoe_ray.engine.messages import Sampling, TokenLogprob

_LEAST_TEMPERATURE = 1e-260
"""No float32 logit divided by it overflows, and any two that differ are as far apart as can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """`logprob` and `top_logprobs` are of the model's own distribution, before temperature."""

    token: int
    logprob: float | None
    top_logprobs: list[TokenLogprob]


class Sampler:
    """The random state of one request; not for two threads at once."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def draw(self, logits_V: torch.Tensor, greedy: int | None = None) -> Drawn:
        """`logits_V`: [vocabulary], no NaN; `greedy` its greatest, where that is known already."""
        count = self._sampling.num_logprobs
        if greedy is None:
            greedy = int(logits_V.argmax())
        if self._sampling.temperature == 0.0 and count is None:
            return Drawn(token=greedy, logprob=None, top_logprobs=[])
        logits_V = logits_V.float().cpu()
        token = greedy if self._sampling.temperature == 0.0 else self._draw(logits_V)
        if count is None:
            return Drawn(token=token, logprob=None, top_logprobs=[])
        logprobs_V = logits_V.log_softmax(-1)
        values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return Drawn(
            token=token,
            logprob=float(logprobs_V[token]),
            top_logprobs=[TokenLogprob(token=t, logprob=p) for t, p in pairs],
        )

    def _draw(self, logits_V: torch.Tensor) -> int:
        """One uniform number per token, whatever is cut off, and the inverse of the distribution's
        cumulative sum over falling probability.
        """
        kept, tokens = distribution(logits_V, self._sampling)
        number = torch.rand((), generator=self._generator, dtype=torch.float64)
        rank = int(torch.searchsorted(kept.cumsum(0), number, right=True))
        return int(tokens[min(rank, len(tokens) - 1)])


def distribution(logits_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, float64 and falling, and their tokens, after temperature, top_k and top_p.

    top_p keeps the shortest run of most probable tokens that reaches it, at least one.
    """
    scaled = logits_V.double() / max(sampling.temperature, _LEAST_TEMPERATURE)
    values, tokens = scaled.sort(descending=True, stable=True)
    if sampling.top_k > 0:
        values, tokens = values[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = values.softmax(0)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        kept = max(1, int((before < sampling.top_p).sum()))
        probabilities, tokens = probabilities[:kept], tokens[:kept]
        probabilities = probabilities / probabilities.sum()
    return probabilities, tokens
