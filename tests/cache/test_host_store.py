"""Who creates, shares, takes over and unlinks a host store, over processes and their deaths."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fmoe_ray.cache import HostStore
from fmoe_ray.errors import CapacityError, ConfigError, FingerprintError, StepTimeoutError

NUM_BLOBS = 5
BLOB_BYTES = 5000

CHILD = """
import sys
from fmoe_ray.cache import HostStore
name, what = sys.argv[1:]
store = HostStore.create(name, "model-a", 5, 5000)
if what == "fill" and not store.is_complete:
    for index in range(5):
        store.blob(index)[:] = index + 1
    store.seal()
print("complete" if store.is_complete else "filling", flush=True)
sys.stdin.readline()
if not store.is_complete:
    for index in range(5):
        store.blob(index)[:] = index + 1
    store.seal()
    print("complete", flush=True)
    sys.stdin.readline()
"""


class Child:
    """A process that holds the store; `fill` seals it at once, `wait` after `go_on()`."""

    def __init__(self, name: str, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, name, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.state = self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def leave(self) -> None:
        self.process.communicate("\n\n", timeout=20)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"fmoe-test-{os.getpid()}-{abs(hash(request.node.name))}"
    yield name
    assert not path_of(name).exists(), "the last user did not unlink the store"


def path_of(name: str) -> Path:
    return Path("/dev/shm") / name


def create(name: str, fingerprint: str = "model-a", timeout_s: float = 20) -> HostStore:
    return HostStore.create(name, fingerprint, NUM_BLOBS, BLOB_BYTES, timeout_s=timeout_s)


def fill(store: HostStore) -> HostStore:
    for index in range(NUM_BLOBS):
        store.blob(index)[:] = index + 1
    store.seal()
    return store


def has_content(store: HostStore) -> bool:
    return all((store.blob(index) == index + 1).all() for index in range(NUM_BLOBS))


def test_blobs_are_page_aligned_and_read_only_once_sealed() -> None:
    with create("") as store:
        assert not store.is_complete
        assert all(store.blob(i).ctypes.data % 4096 == 0 for i in range(NUM_BLOBS))
        fill(store)
        assert store.is_complete and has_content(store)
        assert not store.blob(0).flags.writeable
        with pytest.raises(ValueError, match="blob 5 of 5"):
            store.blob(NUM_BLOBS)


def test_a_view_outlives_close() -> None:
    store = fill(create(""))
    view = store.blob(3)
    store.close()
    assert (view == 4).all()


def test_another_process_shares_the_bytes_and_the_last_user_unlinks(name: str) -> None:
    child = Child(name, "fill")
    store = create(name)
    assert store.is_complete and has_content(store) and not store.blob(0).flags.writeable
    child.leave()
    assert path_of(name).exists()
    assert has_content(store)
    store.close()


def test_what_a_killed_user_leaves_complete_is_taken_over(name: str) -> None:
    child = Child(name, "fill")
    child.kill()
    assert path_of(name).exists()
    with create(name) as store:
        assert store.is_complete and has_content(store)


def test_what_a_killed_creator_leaves_incomplete_is_rebuilt(name: str) -> None:
    child = Child(name, "wait")
    assert child.state == "filling"
    child.kill()
    with create(name) as store:
        assert not store.is_complete
        assert has_content(fill(store))


def test_create_waits_for_the_process_that_fills(name: str) -> None:
    child = Child(name, "wait")
    with pytest.raises(StepTimeoutError, match="still being filled"):
        create(name, timeout_s=0.05)
    child.go_on()
    with create(name) as store:
        assert store.is_complete and has_content(store)
        child.leave()


def test_a_live_store_of_another_model_is_refused(name: str) -> None:
    with fill(create(name, "model-b")) as live:
        with pytest.raises(FingerprintError, match="model-b"):
            create(name, "model-a")
        with pytest.raises(FingerprintError, match="shape"):
            HostStore.create(name, "model-b", NUM_BLOBS + 1, BLOB_BYTES)
        assert has_content(live)


def test_a_stale_store_of_another_model_is_replaced(name: str) -> None:
    child = Child(name, "fill")
    child.kill()
    with create(name, "model-b") as store:
        assert not store.is_complete
        fill(store)


def test_a_creator_that_gives_up_leaves_nothing(name: str) -> None:
    create(name).close()
    assert not path_of(name).exists()


def test_a_store_that_does_not_fit_is_refused_before_its_first_byte(name: str) -> None:
    for chosen in (name, ""):
        with pytest.raises(CapacityError, match=r"needs \d+ bytes, \d+ are available"):
            HostStore.create(chosen, "model-a", 1000, 2**40)
    assert not path_of(name).exists()


def test_a_file_that_is_no_host_store_is_left_alone(name: str) -> None:
    path_of(name).write_bytes(b"something else")
    try:
        with pytest.raises(ConfigError, match="not a host store"):
            create(name)
        assert path_of(name).read_bytes() == b"something else"
    finally:
        path_of(name).unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_store_of_another_user_is_not_trusted(name: str) -> None:
    with fill(create(name)):
        os.chown(path_of(name), os.geteuid() + 1, -1)
        with pytest.raises(ConfigError, match="belongs to user 1"):
            create(name)


def test_a_link_is_not_followed(name: str) -> None:
    target = f"{name}-target"
    with fill(create(target)):
        path_of(name).symlink_to(path_of(target))
        try:
            with pytest.raises(ConfigError, match="is a link"):
                create(name)
        finally:
            path_of(name).unlink()


@pytest.mark.parametrize("wrong", ["a/b", "..", "x" * 201])
def test_a_name_that_is_no_file_name_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="plain file name"):
        create(wrong)


def test_a_sealed_store_cannot_be_sealed_again() -> None:
    with fill(create("")) as store, pytest.raises(ValueError, match="sealed already"):
        store.seal()


def test_the_blob_array_is_uint8_of_the_given_length() -> None:
    with create("") as store:
        assert store.blob(0).dtype == np.uint8 and store.blob(0).shape == (BLOB_BYTES,)
        assert (store.name, store.num_blobs, store.blob_bytes) == ("", NUM_BLOBS, BLOB_BYTES)
