"""`fmoe validate` finds what Serve would ignore or refuse only when deployed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fmoe_ray.actors.serve_file import find_mistakes

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_files_are_right(path: Path) -> None:
    assert find_mistakes(path) == []


def application(document: dict[str, Any]) -> dict[str, Any]:
    found = document["applications"][0]
    assert isinstance(found, dict)
    return found


def deployment(document: dict[str, Any]) -> dict[str, Any]:
    found = application(document)["deployments"][0]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(proxy_locaton="HeadOnly"), "proxy_locaton"),
        (lambda d: d["http_options"].update(prot=1), "http_options.prot"),
        (lambda d: deployment(d).update(max_concurent_queries=3), "max_concurent_queries"),
        (
            lambda d: deployment(d).update(num_replicas="auto", autoscaling_config={"min": 1}),
            "autoscaling_config.min",
        ),
        (lambda d: deployment(d).update(name="Replcia"), "Replcia"),
        (lambda d: deployment(d).update(num_replicas=-1), "num_replicas"),
        (lambda d: deployment(d).pop("max_queued_requests"), "max_queued_requests"),
        (lambda d: deployment(d).update(placement_group_bundles=[{"CPU": 1}]), "args.shards"),
        (lambda d: application(d).update(import_path="fmoe_ray.no:build"), "fmoe_ray.no"),
        (lambda d: application(d)["args"].update(modle={}), "modle: unknown setting"),
        (lambda d: application(d)["args"]["offload"].update(budget="2 pounds"), "2 pounds"),
        (lambda d: application(d)["args"]["offload"].update(policy="fmo"), "'fmo' is unknown"),
        (
            lambda d: application(d)["args"]["offload"].update(policy="lru", store_capacity=9),
            "offload.store_capacity has no effect on policy lru",
        ),
        (lambda d: d.pop("applications"), "applications"),
    ],
)
def test_a_mistake_is_named(change: Change, words: str, tmp_path: Path) -> None:
    document = copy.deepcopy(yaml.safe_load((CONFIGS[-1]).read_text()))
    change(document)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(document))
    mistakes = find_mistakes(path)
    assert len(mistakes) == 1
    assert words in mistakes[0]


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
def test_what_is_no_serve_file_is_a_mistake(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert len(find_mistakes(path)) == 1


def test_a_missing_file_is_a_mistake(tmp_path: Path) -> None:
    assert "cannot be read" in find_mistakes(tmp_path / "none.yaml")[0]
