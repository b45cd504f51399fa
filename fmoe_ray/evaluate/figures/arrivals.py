"""Azure's request traces, scaled to the embedded model, and a server that takes them in turn.

The rule: a prompt gets ContextTokens / 16 tokens, 4 to 400; an answer GeneratedTokens / 8, 2 to 48.
Times of arrival are stretched so that the server would be busy for 70% of them under DeepSpeed.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

_FOLDER = Path(__file__).parents[2] / "assets" / "arrivals"
PROMPT_DIVISOR, PROMPT_LIMITS = 16, (4, 400)
ANSWER_DIVISOR, ANSWER_LIMITS = 8, (2, 48)
UTILISATION = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Of S requests."""

    arrival_s: npt.NDArray[np.float64]
    """[S] from the first one."""
    prompt_tokens: list[int]
    answer_tokens: list[int]


def load_arrivals(kind: str) -> Arrivals:
    """ "conv" or "code"."""
    with (_FOLDER / f"azure-llm-2023-{kind}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Seven digits of a second are one more than Python reads.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return Arrivals(
        arrival_s=np.array([(time - times[0]).total_seconds() for time in times]),
        prompt_tokens=[
            _scaled(row["ContextTokens"], PROMPT_DIVISOR, PROMPT_LIMITS) for row in rows
        ],
        answer_tokens=[
            _scaled(row["GeneratedTokens"], ANSWER_DIVISOR, ANSWER_LIMITS) for row in rows
        ],
    )


def prompts_of_length(texts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Dialogues one behind the other, each cut to its length; the next prompt goes on behind."""
    source = (texts[i % len(texts)] for i in count())
    prompts = []
    for length in lengths:
        prompt: list[int] = []
        while len(prompt) < length:
            prompt += next(source)
        prompts.append(prompt[:length])
    return prompts


def latencies(
    arrival_s: npt.NDArray[np.float64], service_s: Sequence[float]
) -> npt.NDArray[np.float64]:
    """[S] from arrival to end, of a server that takes one request after the other."""
    free = 0.0
    result = []
    for arrival, service in zip(arrival_s, service_s, strict=True):
        free = max(free, float(arrival)) + service
        result.append(free - arrival)
    return np.array(result)


def stretch(
    arrival_s: npt.NDArray[np.float64], service_s: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Times of arrival under which that service keeps the server busy for UTILISATION."""
    span = arrival_s[-1] - arrival_s[0]
    wanted = sum(service_s) / UTILISATION
    return np.asarray(arrival_s * (wanted / span))


def _scaled(text: str, divisor: int, limits: tuple[int, int]) -> int:
    return int(min(max(round(int(text) / divisor), limits[0]), limits[1]))
