"""Token ids to text, piece by piece: whole characters only, and nothing of a stop string."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"
_LONGEST_WAIT = 16
"""Tokens without a whole character in them are not text: no character takes so many."""


class Detokenizer:
    """Turns a growing list of tokens into text whose pieces add up to decoding the whole list.

    A piece that ends within a character waits for the rest of it. Only the last few tokens are
    decoded again, together with the ones before them: many tokenizers write a token differently
    (a leading space) at the start of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here
        self._emitted = 0  # the text of the tokens before this one is out
        self._context_text = ""  # text of tokens[context:emitted]

    def push(self, token: int) -> str:
        """The text that this token completes; "" within a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._context :])
        is_waiting = len(self._tokens) - self._emitted < _LONGEST_WAIT
        if text.endswith(_INCOMPLETE) and is_waiting:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is left at the end. A cut character comes out as U+FFFD, as decoding writes it."""
        return self._advance(self._decode(self._tokens[self._context :]))

    def _advance(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._context = self._emitted
        self._emitted = len(self._tokens)
        self._context_text = self._decode(self._tokens[self._context : self._emitted])
        return piece


class StopStrings:
    """Finds the stop string that completes first, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Returns the text that is safe to show, and whether a stop string was found.

        Text that may be the beginning of a stop string is held back. Nothing may follow a find.
        """
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = self._length_to_hold(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text held back, once nothing follows."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
