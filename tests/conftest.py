"""Shared by all tests: no unit test may start Ray."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Tests that start a cluster carry the marker `ray`."""
    if request.node.get_closest_marker("ray") is None:
        import sys

        ray = sys.modules.get("ray")
        if ray is not None:

            def refuse(*_: Any, **__: Any) -> None:
                raise AssertionError("a test without the marker `ray` called ray.init")

            monkeypatch.setattr(ray, "init", refuse)
    yield
