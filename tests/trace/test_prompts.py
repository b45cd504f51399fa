"""Prompts come out of every file format; what is malformed is named with its place."""

import gzip
import json
from pathlib import Path

import pytest

import fmoe_ray
from fmoe_ray.errors import ConfigError
from fmoe_ray.trace.prompts import read_prompts


def test_json_lines_hold_prompts_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"text": "are you?"}]},
        {"role": "assistant", "content": "A model."},
    ]
    lines = [{"prompt": "Hello", "id": 1}, {"messages": messages}]
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    hello, question = read_prompts(path)
    assert hello.messages == (("user", "Hello"),)
    assert question.messages == (("system", "Be brief."), ("user", "Who are you?"))
    assert question.text == "Who are you?"


def test_sharegpt_gives_the_first_question_of_each_conversation(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    conversations = [
        [{"from": "human", "value": "One"}, {"from": "gpt", "value": "1"}],
        [{"from": "gpt", "value": "an answer only"}],
        [{"from": "system", "value": "Count."}, {"from": "human", "value": "Two"}],
    ]
    path.write_text(json.dumps([{"id": "x", "conversations": turns} for turns in conversations]))
    prompts = read_prompts(path)
    assert [prompt.text for prompt in prompts] == ["One", "Two"]
    assert prompts[1].messages[0] == ("system", "Count.")


def test_text_holds_a_prompt_a_line_packed_or_not(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello\n\n  Grüße \n", encoding="utf-8")
    (tmp_path / "prompts.txt.gz").write_bytes(gzip.compress("Hello\n\nGrüße".encode()))
    for name in ("prompts.txt", "prompts.txt.gz"):
        assert [prompt.text for prompt in read_prompts(tmp_path / name)] == ["Hello", "Grüße"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", b'{"question": "a"}', r'p\.jsonl:1: neither "prompt"'),
        ("p.jsonl", b'{"prompt": 3}', r'p\.jsonl:1: neither "prompt"'),
        ("p.jsonl", b"[]", r'p\.jsonl:1: neither "prompt"'),
        ("p.jsonl", b'{"messages": []}', r"p\.jsonl:1: no message of the user"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}', r'1: a turn has no "role" and "content"'),
        ("p.jsonl", b'{"messages": ["hi"]}', r'1: a turn has no "role" and "content"'),
        (
            "p.jsonl",
            b'{"messages": [{"role": "user", "content": [{"image": "x"}]}]}',
            r'1: a turn has no "role" and "content" of text',
        ),
        ("p.json", b"{}", r"p\.json: a list of conversations is needed"),
        ("p.json", b"[{}]", r'p\.json: entry 0: no "conversations"'),
        ("p.json", b"[", r"p\.json: not JSON"),
        ("p.txt", b" \n", r"p\.txt: no prompt in it"),
        ("p.txt", b"\xff\xfe", r"p\.txt: not UTF-8"),
        ("p.txt.gz", b"plain", r"p\.txt\.gz: not gzip"),
        ("p.txt.gz", gzip.compress(b"cut off")[:-9], r"p\.txt\.gz: not gzip, or damaged"),
    ],
)
def test_what_is_malformed_is_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt: cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")


def test_the_shipped_prompts_say_their_licence() -> None:
    path = Path(fmoe_ray.__file__).parent / "assets" / "prompts" / "prompts.jsonl"
    assert len(read_prompts(path)) == 64
    licences = {json.loads(line)["licence"] for line in path.read_text().splitlines()}
    assert licences == {"Apache-2.0", "CC0-1.0"}
