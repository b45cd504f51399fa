"""A setting is never ignored silently."""

import pytest

from fmoe_ray.config import OffloadSettings, parse_settings
from fmoe_ray.errors import ConfigError
from fmoe_ray.policy import (
    Geometry,
    check_settings,
    list_policies,
    make_policy,
    unused_settings,
)

Section = dict[str, dict[str, object]]


@pytest.mark.parametrize("name", [info.name for info in list_policies()])
def test_learned_maps_are_saved_and_shared_where_there_are_any(name: str) -> None:
    info = next(info for info in list_policies() if info.name == name)
    predictor = make_policy(name, geometry=Geometry(2, 4, 2), num_slots=8).predictor
    learns = predictor is not None and predictor.store() is not None
    assert ("store_path" in info.parameters) == ("share_maps" in info.parameters) == learns


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"offload": {"policy": "lru", "store_path": "maps"}}, "offload.store_path.*policy lru"),
        ({"offload": {"policy": "promoe", "share_maps": True}}, "offload.share_maps.*promoe"),
        ({"offload": {"policy": "lru"}, "routing": {"by_experts": True}}, "lru learns no expert"),
        ({"offload": {"share_maps": False}, "routing": {"by_experts": True}}, "share_maps is fal"),
        (
            {"offload": {"policy": "lru", "prefetch_distance": 3}},
            "offload.prefetch_dist.*policy lru",
        ),
        ({"routing": {"max_lead": 2}}, "routing.max_lead has no effect"),
        ({"model": {"device": "cuda"}, "offload": {"link_gbps": 2}}, "link_gbps 2 slows a CPU's"),
        ({"model": {"device": "cpu"}, "engine": {"cuda_graphs": True}}, "engine.cuda_graphs"),
    ],
)
def test_a_setting_without_effect_is_refused(args: Section, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(parse_settings(args))


@pytest.mark.parametrize(
    "args",
    [
        {"offload": {"policy": "lru", "store_path": None}},
        {"offload": {"policy": "fmoe", "store_path": "maps", "share_maps": False}},
        {"offload": {"policy": "fmoe+", "pooling": "last", "prefetch_distance": 5}},
        {"offload": {"policy": "fmoe+", "store_capacity": 9, "eviction": "lru"}},
        {"routing": {"by_experts": True, "max_lead": 2}},
        {"model": {"device": "cpu"}, "offload": {"link_gbps": 2}},
        {"model": {"device": "cpu"}, "engine": {"cuda_graphs": False}},
        {"engine": {"cuda_graphs": True}},
    ],
)
def test_a_setting_with_effect_is_accepted(args: Section) -> None:
    check_settings(parse_settings(args))


def test_what_automatic_comes_to_is_checked_too() -> None:
    throttled = parse_settings({"offload": {"link_gbps": 2}})
    check_settings(throttled)
    check_settings(throttled, "cpu")
    with pytest.raises(ConfigError, match="link_gbps"):
        check_settings(throttled, "cuda")


def test_what_was_not_given_is_never_unused() -> None:
    assert unused_settings(OffloadSettings(policy="lru")) == []
