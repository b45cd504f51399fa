"""Shared by all tests: no unit test may start Ray."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# A busy machine must not fail a law: examples are bounded in number, not in time.
settings.register_profile("fmoe", deadline=None)
settings.load_profile("fmoe")


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
