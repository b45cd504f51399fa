"""Requests of the OpenAI API, checked. A field without effect here is refused, not ignored.

Knows no engine: `api.jobs` turns these into generation requests.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def _check_stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) <= 4:
        if all(isinstance(stop, str) and stop for stop in stops):
            return stops
    raise ValueError("give a non-empty string, or a list of at most 4 of them")


def _check_content(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("give a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError("only parts of type text are supported")
        if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise ValueError("a text part has the keys type and text, a string")
        texts.append(part["text"])
    return "".join(texts)


def _check_prompt(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if _are_tokens(value):
            return [value]
        if all(isinstance(item, list) and item and _are_tokens(item) for item in value):
            return list(value)
    raise ValueError("give a string, a list of token ids, or a non-empty list of one of these")


def _are_tokens(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


class _Body(BaseModel):
    """`neutral` names fields that have no effect here, and the values that ask for none."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields_without_effect(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, values in cls.neutral.items():
            value = data.get(name)
            if value is not None and value not in values:
                raise PydanticCustomError(
                    "unsupported_field",
                    "is not supported by this server; leave it out",
                    {"field": name},
                )
        return {name: value for name, value in data.items() if name not in cls.neutral}


class StreamOptions(_Body):
    neutral = {"include_obfuscation": (False,)}
    include_usage: bool = False


class _Generation(_Body):
    """What chat and plain completions share. null stands for the default everywhere."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """0 is greedy; 1 if not given."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Extension: keep only the k likeliest tokens; 0 or -1 keeps all."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_check_stop)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Extension: go on after the model's own end."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> "_Generation":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported_field",
                "is only allowed when stream is true",
                {"field": "stream_options"},
            )
        return self


class ChatMessage(_Body):
    neutral = {
        "name": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_check_content)]


_NEUTRAL_PENALTIES: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "user": (),
}


class ChatCompletionRequest(_Generation):
    neutral = {
        **_NEUTRAL_PENALTIES,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Up to the end of the context if not given."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatCompletionRequest":
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "unsupported_field",
                "and max_completion_tokens differ; give one of them",
                {"field": "max_tokens"},
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "unsupported_field", "needs logprobs: true", {"field": "top_logprobs"}
            )
        return self


class CompletionRequest(_Generation):
    neutral = {**_NEUTRAL_PENALTIES, "best_of": (1,), "echo": (False,), "suffix": ("",)}
    prompt: Annotated[list[str | list[int]], BeforeValidator(_check_prompt)]
    """Several prompts give several choices, n for each prompt, in their order."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
