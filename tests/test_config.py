"""Settings: what is understood, what is refused, and what the refusal says."""

from pathlib import Path

import pytest

from fmoe_ray.config import (
    Budget,
    Settings,
    load_settings,
    parse_bytes,
    parse_settings,
    parse_yaml,
)
from fmoe_ray.errors import ConfigError

FILE = "applications: [{args: {model: {path: tiny}, engine: {max_batch_size: 3}}}]"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1b", 1),
        ("4GiB", 4 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("0.5GB", 500_000_000),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "4", "GiB", "4 TiB", "-1GiB", "1e3MiB", "4GiB!", "1.GiB"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; write for example 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        (0.25, Budget(fraction=0.25)),
        (1.0, Budget(fraction=1.0)),
        ("0.25", Budget(fraction=0.25)),
        (".5", Budget(fraction=0.5)),
        ("1e-2", Budget(fraction=0.01)),
        ("25%", Budget(fraction=0.25)),
        ("12.5%", Budget(fraction=0.125)),
        (64, Budget(num_experts=64)),
        ("64", Budget(num_experts=64)),
        (1, Budget(num_experts=1)),
        ("4GiB", Budget(num_bytes=4 * 2**30)),
        ("auto", Budget()),
        (" Auto ", Budget()),
    ],
)
def test_a_budget_is_a_fraction_a_size_a_number_or_automatic(value: object, budget: Budget) -> None:
    assert Budget.parse(value) == budget
    assert budget.is_automatic == (budget == Budget())
    assert parse_settings({"offload": {"budget": value}}).offload.budget == budget


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "above 0 and at most at 1"),
        (1.5, "above 0 and at most at 1"),
        ("101%", "above 0 and at most at 1"),
        ("0%", "above 0 and at most at 1"),
        (0, "at least top_k experts"),
        ("0MiB", "at least top_k experts"),
        (-3, "write 0.25, 25%, 4GiB"),
        (True, "write 0.25, 25%, 4GiB"),
        (None, "write 0.25, 25%, 4GiB"),
        (float("nan"), "write 0.25, 25%, 4GiB|is not a size"),
        (float("inf"), "write 0.25, 25%, 4GiB|is not a size"),
        ("", "write 0.25, 25%, 4GiB"),
        ("half", "write 0.25, 25%, 4GiB"),
        ("2 pounds", "'2 pounds' is not a size"),
    ],
)
def test_a_wrong_budget_is_refused_with_its_key(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"offload\.budget: .*({words})"):
        parse_settings({"offload": {"budget": value}})


@pytest.mark.parametrize(
    ("budget", "slots"),
    [
        (Budget(fraction=0.25), 4),
        (Budget(fraction=1.0), 16),
        (Budget(fraction=0.3), 4),
        (Budget(num_bytes=999), 9),
        (Budget(num_experts=5), 5),
        (Budget(num_experts=500), 16),
        (Budget(num_bytes=10**9), 16),
        (Budget(), 16),
    ],
)
def test_a_budget_is_cut_to_whole_experts_and_to_all(budget: Budget, slots: int) -> None:
    assert budget.slots(num_experts=16, expert_bytes=100, min_slots=2) == slots


def test_a_fraction_of_whole_experts_is_not_rounded_away() -> None:
    for num_experts in range(1, 400):
        budget = Budget.parse(repr(1 / num_experts))
        assert budget.slots(num_experts=num_experts, expert_bytes=1, min_slots=1) == 1


@pytest.mark.parametrize(
    "budget", [Budget(fraction=0.1), Budget(num_bytes=199), Budget(num_experts=1)]
)
def test_a_budget_below_a_tokens_experts_says_how_much_is_needed(budget: Budget) -> None:
    with pytest.raises(ConfigError, match=r"holds 1 experts.*at least 2, or 200 bytes"):
        budget.slots(num_experts=16, expert_bytes=100, min_slots=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modle": {}}, "modle: unknown setting"),
        ({"model": {"device": "tpu"}}, r"model\.device: .*got 'tpu'"),
        ({"engine": {"max_batch_size": 0, "num_threads": -1}}, r"size: .*got 0; engine\.num_thr"),
        ({"offload": {"chunk_bytes": "4 stone"}}, r"chunk_bytes: .*'4 stone' is not a size"),
        ({"offload": {"chunk_bytes": 0}}, r"chunk_bytes: .*got 0"),
        ({"offload": {"chunk_bytes": 1}}, r"chunk_bytes: .*got 1"),
        ({"model": {"path": ""}}, r"model\.path: .*got ''"),
        ({"model": {"served_name": ""}}, r"model\.served_name: .*got ''"),
        ({"offload": {"store_path": ""}}, r"offload\.store_path: .*got ''"),
        ({"offload": {"record_path": ""}}, r"offload\.record_path: .*got ''"),
        ({"model": 3}, "model: .*got 3"),
        ([], r"\(top level\): Input should be a valid dictionary"),
    ],
)
def test_every_wrong_key_and_value_is_named(args: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings(args)


@pytest.mark.parametrize("path", [".", "..", "/", "tiny", "owner/name", "/a/b/"])
def test_a_model_always_has_a_name(path: str) -> None:
    name = parse_settings({"model": {"path": path}}).model.name
    assert name not in ("", ".", "..")
    assert parse_settings({"model": {"path": path, "served_name": "mine"}}).model.name == "mine"


def test_the_first_applications_arguments_are_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    settings = load_settings(path)
    assert (settings.model.path, settings.engine.max_batch_size) == ("tiny", 3)
    path.write_text("applications: [{name: x}]")
    assert load_settings(path) == Settings()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "not YAML: .*utf-8"),
        (b"a: [", "not YAML"),
        (b"when: 2001-99-99", "not YAML: month"),
        (b"!!bool perhaps", "not YAML"),
        (b"!!timestamp soon", "not YAML"),
        (b"[" * 1000, "not YAML"),
        (b"", "no applications: list"),
        (b"3", "no applications: list"),
        (b"applications: []", "no applications: list"),
        (b"applications: [3]", "no applications: list"),
        (b"applications: [{args: 3}]", "must be a mapping, not int"),
        (b"applications: [{args: {model: {pth: x}}}]", r"model\.pth: unknown setting"),
    ],
)
def test_a_file_that_holds_no_settings_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"serve\.yaml: .*{words}"):
        load_settings(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "nowhere.yaml")


def test_text_is_read_as_the_same_bytes_are() -> None:
    assert parse_yaml("a: ä") == parse_yaml("a: ä".encode()) == {"a": "ä"}
