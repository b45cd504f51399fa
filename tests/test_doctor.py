"""The doctor names what is there and gives a remedy for each warning."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmoe_ray.doctor import SHM, STORE_PREFIX, Finding, examine


def named(name: str) -> list[Finding]:
    return [finding for finding in examine() if finding.name == name]


def test_every_warning_has_a_remedy() -> None:
    findings = examine()
    assert {"cpu", "memory", "shm", "torch", "transformers", "ray", "compiled core"} <= {
        finding.name for finding in findings
    }
    assert all(finding.is_ok or finding.remedy for finding in findings)


@pytest.fixture
def store() -> Iterator[Path]:
    path = SHM / f"{STORE_PREFIX}test-{os.getpid()}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink()


def test_a_store_that_nobody_maps_is_stale(store: Path) -> None:
    def is_stale() -> bool:
        return any(str(store) in finding.value for finding in named("stale store"))

    assert is_stale()
    with store.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert not is_stale()
