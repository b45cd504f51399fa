"""`fmoe validate` finds what Serve would ignore or refuse only when deployed."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fmoe_ray.actors.config_files import find_mistakes

ROOT = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(ROOT.rglob("*.yaml"))
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
        (
            lambda d: application(d)["args"].update(
                offload={"policy": "lru"}, routing={"by_experts": True}
            ),
            "policy lru learns no expert maps",
        ),
        (lambda d: d.pop("applications"), "applications"),
    ],
)
def test_a_mistake_is_named(change: Change, words: str, tmp_path: Path) -> None:
    assert_mistake("tiny.yaml", change, words, tmp_path)


def scaling(document: dict[str, Any]) -> dict[str, Any]:
    found = deployment(document)["autoscaling_config"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: scaling(d)["policy"]["policy_kwargs"].pop("target_tokens"), "target_tokens"),
        (
            lambda d: scaling(d)["policy"]["policy_kwargs"].update(target_tokens=0),
            "target_tokens 0",
        ),
        (lambda d: scaling(d)["policy"]["policy_kwargs"].update(token=1), "token"),
        (lambda d: scaling(d).update(target_ongoing_requests=2), "remove one of the two"),
        (
            lambda d: scaling(d)["policy"].update(policy_function="no_such_package:Policy"),
            "no_such_package",
        ),
        (lambda d: scaling(d).update(policy="mine:Policy"), "must be a mapping"),
        (
            lambda d: deployment(d).update(
                request_router_config={"request_router_class": "fmoe_ray.actors.router:Nobody"}
            ),
            "fmoe_ray.actors.router:Nobody",
        ),
    ],
)
def test_a_mistake_in_the_scaling_policy_is_named(
    change: Change, words: str, tmp_path: Path
) -> None:
    assert_mistake("mixtral.yaml", change, words, tmp_path)


def assert_mistake(name: str, change: Change, words: str, tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / name).read_text())
    change(document)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(document))
    mistakes = find_mistakes(path)
    assert len(mistakes) == 1
    assert words in mistakes[0]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every part of a document down to the third level."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys if len(path) < 3 else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("name", ["tiny.yaml", "cluster/gcp.yaml", "cluster/rayservice.yaml"])
@pytest.mark.parametrize("value", [None, "x", [1]], ids=repr)
def test_a_part_of_the_wrong_type_is_never_a_traceback(
    name: str, value: object, tmp_path: Path
) -> None:
    document = yaml.safe_load((ROOT / name).read_text())
    path = tmp_path / "wrong.yaml"
    mistakes = 0
    for *parents, key in list(places(document)):
        changed = copy.deepcopy(document)
        part = changed
        for parent in parents:
            part = part[parent]
        part[key] = value
        path.write_text(yaml.safe_dump(changed))
        mistakes += bool(find_mistakes(path))
    assert mistakes > 3


@pytest.mark.parametrize("content", [b"\xff", b"a: [", b"when: 2001-99-99", b"[" * 1000])
def test_what_is_not_yaml_is_said_to_be_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    assert [mistake.partition(":")[0] for mistake in find_mistakes(path)] == ["not YAML"]


@pytest.mark.parametrize(
    "name_it",
    [
        lambda d, path: application(d).update(import_path=path),
        lambda d, path: scaling(d)["policy"].update(policy_function=path),
        lambda d, path: deployment(d).update(
            request_router_config={"request_router_class": path},
        ),
    ],
    ids=["application", "scaling policy", "router"],
)
def test_what_a_checked_file_names_is_not_imported(
    name_it: Callable[[dict[str, Any], str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    document = yaml.safe_load((ROOT / "mixtral.yaml").read_text())
    name_it(document, "planted:Thing")
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(document))
    assert find_mistakes(path) == []
    assert "planted" not in sys.modules


def test_a_checked_file_runs_no_command(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    document = yaml.safe_load((ROOT / "mixtral.yaml").read_text())
    scaling(document)["policy"] = {
        "policy_kwargs": {"args": f"touch {trace}", "shell": True},
    }
    for name in ("subprocess:Popen", "subprocess.Popen"):
        scaling(document)["policy"]["policy_function"] = name
        path = tmp_path / "wrong.yaml"
        path.write_text(yaml.safe_dump(document))
        find_mistakes(path)
    assert not trace.exists()


def gpu_nodes(document: dict[str, Any]) -> dict[str, Any]:
    found = document["available_node_types"]["gpu_4x_l4"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", ["cluster/aws.yaml", "cluster/gcp.yaml"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(max_worker=4), "max_worker"),
        (lambda d: d.update(head_node_type="haed"), "head_node_type"),
        (lambda d: d["docker"].update(imgae="x"), "imgae"),
        (lambda d: gpu_nodes(d).update(maxworkers=1), "maxworkers"),
        (lambda d: gpu_nodes(d).update(min_workers=9), "min_workers"),
        (lambda d: gpu_nodes(d)["node_config"].update(machinTyp="x"), "node_config.machinTyp"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_named(
    name: str, change: Change, words: str, tmp_path: Path
) -> None:
    assert_mistake(name, change, words, tmp_path)


def test_gpus_that_google_would_not_count_are_asked_for(tmp_path: Path) -> None:
    def forget(document: dict[str, Any]) -> None:
        del gpu_nodes(document)["resources"]["GPU"]

    assert_mistake("cluster/gcp.yaml", forget, "state GPU", tmp_path)


def ray_cluster(document: dict[str, Any]) -> dict[str, Any]:
    found = document["spec"]["rayClusterConfig"]
    assert isinstance(found, dict)
    return found


def in_serve_config(change: Change) -> Change:
    def apply(document: dict[str, Any]) -> None:
        serve = yaml.safe_load(document["spec"]["serveConfigV2"])
        change(serve)
        document["spec"]["serveConfigV2"] = yaml.safe_dump(serve)

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(kind="RayServce"), "RayServce"),
        (lambda d: d["spec"].update(serveConfig="x"), "spec.serveConfig"),
        (lambda d: ray_cluster(d).update(rayVerson="2"), "rayVerson"),
        (lambda d: ray_cluster(d).update(rayVersion="2.59.0"), "rayVersion 2.59.0"),
        (lambda d: ray_cluster(d)["workerGroupSpecs"][0].update(maxReplica=3), "maxReplica"),
        (lambda d: ray_cluster(d)["workerGroupSpecs"][0].update(replicas=9), "outside 0 to 4"),
        (in_serve_config(lambda s: deployment(s).update(max_ongoing=1)), "max_ongoing"),
        (in_serve_config(lambda s: application(s)["args"].update(modle={})), "modle"),
    ],
)
def test_a_mistake_in_a_manifest_is_named(change: Change, words: str, tmp_path: Path) -> None:
    if words == "rayVersion 2.59.0":  # of both containers
        document = yaml.safe_load((ROOT / "cluster/rayservice.yaml").read_text())
        change(document)
        path = tmp_path / "wrong.yaml"
        path.write_text(yaml.safe_dump(document))
        assert [words in mistake for mistake in find_mistakes(path)] == [True, True]
    else:
        assert_mistake("cluster/rayservice.yaml", change, words, tmp_path)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
def test_what_is_no_serve_file_is_a_mistake(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert len(find_mistakes(path)) == 1


def test_a_missing_file_is_a_mistake(tmp_path: Path) -> None:
    assert "cannot be read" in find_mistakes(tmp_path / "none.yaml")[0]
