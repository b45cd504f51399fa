"""The dialogues inside the package, and the routing that a model shows while it answers them."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fmoe_ray.config import Budget, Settings
from fmoe_ray.engine.model_tokenizer import ModelTokenizer
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.engine.tokenizer import Tokenizer
from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.drive import Drive
from fmoe_ray.trace.format import RoutingTrace, load_trace
from fmoe_ray.trace.prompts import read_prompts

DIALOGUES = Path(__file__).parents[1] / "assets" / "prompts" / "dialogues.jsonl"
"""400 first user turns of task dialogues that the demonstration model was not trained on."""
RECORDING_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogues:
    """Prompts as token ids. The first `seen` teach the policies, the others are measured."""

    seen: list[list[int]]
    held_out: list[list[int]]
    eos: frozenset[int]


def load_dialogues(settings: Settings, *, seen: int, held_out: int) -> Dialogues:
    """In the chat template of the settings' model. Raises ConfigError for more than there are."""
    prompts = read_prompts(DIALOGUES)
    if seen + held_out > len(prompts):
        raise ConfigError(
            f"{seen} seen and {held_out} held-out dialogues; the package has {len(prompts)}"
        )
    tokenizer: Tokenizer = ModelTokenizer.load(settings.model.path)
    tokens = [
        tokenizer.encode_chat([{"role": role, "content": text} for role, text in prompt.messages])
        for prompt in prompts[: seen + held_out]
    ]
    return Dialogues(seen=tokens[:seen], held_out=tokens[seen:], eos=tokenizer.eos_token_ids)


def record_routing(
    settings: Settings,
    prompts: list[list[int]],
    *,
    max_tokens: int | list[int],
    eos: frozenset[int] = frozenset(),
) -> RoutingTrace:
    """Answers the prompts greedily with every expert resident; a sequence of the trace each.

    The routing of a request does not depend on the requests beside it, so several run at once.
    """
    longest_answer = max_tokens if isinstance(max_tokens, int) else max(max_tokens)
    longest = max(map(len, prompts)) + longest_answer
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.npz")
        offload = settings.offload.model_copy(
            update={
                "policy": "lru",
                "budget": Budget(fraction=1.0),
                "link_gbps": None,
                "store_path": None,
                "record_path": path,
            }
        )
        engine = settings.engine.model_copy(
            update={"max_batch_size": RECORDING_BATCH, "max_context": longest}
        )
        runner = StepRunner.load(settings.model_copy(update={"offload": offload, "engine": engine}))
        try:
            Drive(runner, chunk=longest, eos=eos)(prompts, max_tokens)
        finally:
            runner.shutdown()
        return load_trace(path)
