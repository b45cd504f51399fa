"""Text to tokens and back: the seam to the model's tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

ChatMessage = Mapping[str, str]
"""Keys `role` and `content`."""


class Tokenizer(Protocol):
    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from the checkpoint's generation settings."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of the conversation up to where the answer begins.

        Raises InvalidRequestError if the chat template refuses the messages or there is none.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens; an incomplete character becomes U+FFFD."""
        ...
