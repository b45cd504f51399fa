"""Text comes out whole: no half characters, nothing of a stop string, nothing lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ray.engine.detokenizer import Detokenizer, StopStrings


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def decode_words(tokens: Sequence[int]) -> str:
    """Like sentencepiece: every word carries a leading space, dropped at the start of a text."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


def pieces_of(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*[detokenizer.push(token) for token in tokens], detokenizer.flush()]


@given(st.text())
def test_pieces_add_up_to_the_text_and_never_hold_half_a_character(text: str) -> None:
    pieces = pieces_of(Detokenizer(decode_bytes), text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 99)))
def test_pieces_keep_the_spaces_that_depend_on_position(tokens: list[int]) -> None:
    assert "".join(pieces_of(Detokenizer(decode_words), tokens)) == decode_words(tokens)


def test_a_cut_character_at_the_end_comes_out_as_decoding_writes_it() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert pieces_of(detokenizer, "a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = pieces_of(detokenizer, [0xFF] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert max(len(piece) for piece in pieces) <= 16


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The plain reference: read letter by letter until the text ends with a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_stop_strings_are_found_however_the_text_is_cut(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopStrings(stops)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        assert not any(stop in shown for stop in stops)
        if stopped:
            break
    shown += matcher.flush()
    assert (shown, stopped) == first_stop("".join(pieces), stops)


@pytest.mark.parametrize("piece", ["x", "ab", "xxab"])
def test_only_what_may_begin_a_stop_string_is_held_back(piece: str) -> None:
    text, stopped = StopStrings(["abc"]).push(piece)
    assert (text, stopped) == (piece.removesuffix("ab"), False)
