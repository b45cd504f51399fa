"""The tokenizer of the model inside the package."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fmoe_ray.engine.detokenizer import Detokenizer
from fmoe_ray.engine.model_tokenizer import ModelTokenizer
from fmoe_ray.errors import CheckpointError, InvalidRequestError
from fmoe_ray.models.checkpoint import TINY_FOLDER

TEXT = "I need a hotel in Zürich, it's 5€. 你好 🙂!"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load("tiny")


def test_pieces_add_up_to_what_the_library_decodes(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [*[detokenizer.push(token) for token in tokens], detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_conversation_is_what_the_library_makes_of_it(tokenizer: ModelTokenizer) -> None:
    library = AutoTokenizer.from_pretrained(TINY_FOLDER)
    text = library.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    expected = library.encode(text, add_special_tokens=False)
    assert tokenizer.encode_chat(HELLO) == expected


def test_the_end_of_an_answer_comes_from_the_checkpoint(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.eos_token_ids
    assert tokenizer.decode(sorted(tokenizer.eos_token_ids)) == ""


def test_a_model_without_a_chat_template_says_so() -> None:
    library = AutoTokenizer.from_pretrained(TINY_FOLDER)
    library.chat_template = None
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        ModelTokenizer(library, frozenset()).encode_chat(HELLO)


def test_a_template_that_refuses_is_a_bad_request() -> None:
    library = AutoTokenizer.from_pretrained(TINY_FOLDER)
    library.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ModelTokenizer(library, frozenset()).encode_chat(HELLO)


def test_a_folder_without_a_tokenizer_is_a_broken_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        ModelTokenizer.load(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_generation_config_is_named(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(TINY_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        ModelTokenizer.load(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_tokenizer_is_named(name: str, content: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(TINY_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        ModelTokenizer.load(str(folder))
