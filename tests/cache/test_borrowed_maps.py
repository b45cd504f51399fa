"""Maps are lent between iterations only: searches wait for the borrower, inference does not."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from clusters.waiting import within

from fmoe_ray.cache import Geometry, HostStore, Offloader
from fmoe_ray.errors import EngineError, StepTimeoutError

L, J = 2, 4
LIMIT_S = 10.0


@pytest.fixture
def offloader() -> Iterator[Offloader]:
    with HostStore.create("", "test", L * J, 64) as store:
        store.seal()
        with Offloader(store, Geometry(L, J, 1), 4, "fmoe") as offloader:
            yield offloader


def begin(offloader: Offloader) -> None:
    offloader.begin_iteration(
        np.zeros(1, np.int64), np.ones(1, np.uint8), np.zeros(1, np.int32), None
    )


def gate(offloader: Offloader, layer: int) -> None:
    offloader.request(layer, np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    while delivered := offloader.wait():
        offloader.release([expert for expert, _ in delivered])
    offloader.publish_gate(layer, np.full((1, J), 0.25, np.float32))


def iterate(offloader: Offloader, num_iterations: int = 1) -> None:
    for _ in range(num_iterations):
        begin(offloader)
        for layer in range(L):
            gate(offloader, layer)
        offloader.end_iteration()


def num_maps(offloader: Offloader) -> int:
    with offloader.borrow_maps(LIMIT_S) as maps:
        return maps.size


def is_lent(offloader: Offloader) -> bool:
    with offloader.borrow_maps(0.01):
        return True


def test_what_was_learnt_can_be_read_and_changed_between_iterations(offloader: Offloader) -> None:
    iterate(offloader)
    within(LIMIT_S, lambda: num_maps(offloader) > 0)  # the matcher has its own pace
    with offloader.borrow_maps(LIMIT_S) as maps:
        maps.insert(np.full((2, L, J), 0.25, np.float32), None, None, None, [], False)
    iterate(offloader)
    within(LIMIT_S, lambda: num_maps(offloader) == 4)
    begin(offloader)
    gate(offloader, 0)
    gate(offloader, 1)
    assert offloader.end_iteration().num_maps == 4


def test_inference_goes_on_while_maps_are_borrowed(offloader: Offloader) -> None:
    iterate(offloader)
    with offloader.borrow_maps(LIMIT_S) as maps:
        before = maps.size
        iterate(offloader, 20)  # more than the queue of the matcher holds
        assert maps.size == before
    assert offloader.counters().iterations == 21
    assert offloader.counters().iterations_dropped > 0


def test_an_iteration_in_progress_is_waited_for_but_not_for_ever(offloader: Offloader) -> None:
    begin(offloader)
    gate(offloader, 0)
    started = threading.Event()
    sizes: list[int] = []

    def borrow() -> None:
        started.set()
        sizes.append(num_maps(offloader))

    with pytest.raises(StepTimeoutError, match="did not end within"):
        within(LIMIT_S, lambda: not is_lent(offloader))  # until the matcher has begun it
    thread = threading.Thread(target=borrow)
    thread.start()
    started.wait(LIMIT_S)
    gate(offloader, 1)
    offloader.end_iteration()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert sizes == [1]


def test_policies_without_maps_and_closed_offloaders_lend_nothing(offloader: Offloader) -> None:
    with HostStore.create("", "test", L * J, 64) as store:
        store.seal()
        with Offloader(store, Geometry(L, J, 1), 4, "lru") as without:
            with pytest.raises(ValueError, match="learns no expert maps"):
                with without.borrow_maps(LIMIT_S):
                    pass
    offloader.close()
    with pytest.raises(EngineError, match="close"):
        with offloader.borrow_maps(LIMIT_S):
            pass
