"""The checkpoint's own tokenizer, chat template and end-of-sequence tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig

from fmoe_ray.engine.tokenizer import ChatMessage
from fmoe_ray.errors import CheckpointError, InvalidRequestError
from fmoe_ray.models.checkpoint import resolve


class ModelTokenizer:
    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, path: str) -> "ModelTokenizer":
        """Raises CheckpointNotFoundError, and CheckpointError if the tokenizer cannot be read."""
        folder = resolve(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of a damaged file the libraries raise nothing narrower
            raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        # The first call settles truncation and padding; later ones only read, from any thread.
        tokenizer.encode("")
        return cls(tokenizer, _eos_token_ids(folder, tokenizer))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", "messages"
            )
        try:
            tokens: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages: {error}", "messages"
            ) from error
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _eos_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """From generation_config.json where there is one: it may name several; else the tokenizer's."""
    ids: int | list[int] | None = None
    if (folder / "generation_config.json").is_file():
        try:
            ids = GenerationConfig.from_pretrained(folder).eos_token_id
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}: generation_config.json cannot be read: {error}"
            ) from error
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
