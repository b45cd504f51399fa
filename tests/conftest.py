"""Shared by all tests: no unit test may start Ray."""

from collections.abc import Iterator
from importlib import import_module
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

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a test without the marker `ray` called ray.init")

        # Imported for it, not only where it is already: a test may import it in its own body.
        monkeypatch.setattr(import_module("ray"), "init", refuse)
    yield
