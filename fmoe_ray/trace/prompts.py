"""Reads prompts from the files they come in: ShareGPT JSON, JSON lines, plain text."""

import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmoe_ray.errors import ConfigError

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    messages: tuple[tuple[str, str], ...]
    """(role, content), as a chat request sends them; the last is the user's."""

    @property
    def text(self) -> str:
        """What the user asks last."""
        return self.messages[-1][1]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """By the file's ending, `.gz` behind it or not.

    .json: ShareGPT, a list of {"conversations": [{"from", "value"}]}, up to the first question of
    each. .jsonl: {"prompt"} or {"messages": [{"role", "content"}]} a line. Any other: text, a
    prompt a line. Empty lines are left out. Raises ConfigError naming file and line or entry.
    """
    path = Path(path)
    text = _read_text(path)
    ending = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if ending == ".json":
        prompts = _from_sharegpt(text, path)
    elif ending == ".jsonl":
        prompts = [
            _from_object(_parse(line, f"{path}:{number}"), f"{path}:{number}")
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip()
        ]
    else:
        prompts = [_asked(line.strip()) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"{path}: no prompt in it")
    return prompts


def _asked(text: str) -> Prompt:
    return Prompt(messages=(("user", text),))


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: not gzip, or damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error


def _from_object(entry: Any, where: str) -> Prompt:
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return _asked(entry["prompt"])
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise ConfigError(f'{where}: neither "prompt", a string, nor "messages", a list')
    turns = [_turn(message, "role", "content", where) for message in messages]
    while turns and turns[-1][0] != "user":
        turns.pop()  # an answer is not part of the question
    if not turns:
        raise ConfigError(f"{where}: no message of the user")
    return Prompt(messages=tuple(turns))


def _from_sharegpt(text: str, path: Path) -> list[Prompt]:
    entries = _parse(text, str(path))
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: a list of conversations is needed")
    prompts = []
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number}"
        conversation = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(conversation, list):
            raise ConfigError(f'{where}: no "conversations", a list')
        turns = [_turn(turn, "from", "value", where) for turn in conversation]
        asked = [index for index, (role, _) in enumerate(turns) if role == "user"]
        if asked:  # ShareGPT has conversations that hold answers only
            prompts.append(Prompt(messages=tuple(turns[: asked[0] + 1])))
    return prompts


def _turn(turn: Any, role_key: str, text_key: str, where: str) -> tuple[str, str]:
    role = turn.get(role_key) if isinstance(turn, dict) else None
    content = turn.get(text_key) if isinstance(turn, dict) else None
    if isinstance(content, list):  # parts, as multimodal chat requests have them
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        known = [text for text in texts if isinstance(text, str)]
        content = "".join(known) if len(known) == len(texts) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(f'{where}: a turn has no "{role_key}" and "{text_key}" of text: {turn!r}')
    return _ROLES.get(role, role), content
