"""The order in which a layer's experts are asked for, told of and computed; and their slots."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fmoe_ray.cache import Geometry, Offloader
from fmoe_ray.config import Budget, OffloadSettings
from fmoe_ray.engine.host_memory import RESERVE_BYTES, free_host_bytes
from fmoe_ray.engine.messages import Row
from fmoe_ray.engine.offloaded_experts import OffloadedExperts, open_offloader
from fmoe_ray.engine.packed_model import PackedModel
from fmoe_ray.errors import CapacityError
from fmoe_ray.evaluate.tiny_models import EXPERTS, LAYERS, TOP_K
from fmoe_ray.models.experts import bind_experts
from fmoe_ray.models.loader import LoadedModel, load_model
from fmoe_ray.models.router import RouterTap


@pytest.fixture
def loaded(checkpoint: Callable[[str], Path]) -> Iterator[LoadedModel]:
    path = str(checkpoint("mixtral"))
    loaded = load_model(path, device=torch.device("cpu"), dtype=torch.float32)
    yield loaded
    loaded.store.close()


class LoggedOffloader(Offloader):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []

    def request(self, layer: int, *args: Any) -> None:
        self.calls.append(f"request {layer}")
        super().request(layer, *args)

    def publish_gate(self, layer: int, *args: Any) -> None:
        self.calls.append(f"publish {layer}")
        super().publish_gate(layer, *args)

    def wait(self) -> list[tuple[int, int]]:
        if self.calls[-1] != "wait":
            self.calls.append("wait")
        return super().wait()


def test_a_gate_is_published_before_its_layers_experts_are_waited_for(loaded: LoadedModel) -> None:
    """As the simulator predicts: prefetches move while the layer computes."""
    model = PackedModel(loaded.model, num_slots=1, max_context=8, device=loaded.device)
    geometry = Geometry(loaded.num_layers, loaded.num_experts, loaded.top_k)
    with LoggedOffloader(
        loaded.store, geometry, 4, "fmoe", embedding_size=loaded.hidden_size
    ) as offloader:
        experts = OffloadedExperts(loaded, offloader, RouterTap(loaded.model))
        bind_experts(loaded.experts.values(), experts)
        row = Row(request_id=1, slot=0, start=0, tokens=[5, 6], samples=True)
        tokens = model.token_ids([row])
        with torch.inference_mode():
            embedding = model.embed(tokens).mean(0, keepdim=True).numpy()
            offloader.begin_iteration(*_context(), embedding)
            experts.begin_step([2])
            model.forward([row], tokens)
        offloader.end_iteration()
        experts.close()
        offloader.check_integrity()
    steps = [(f"request {layer}", f"publish {layer}", "wait") for layer in range(LAYERS)]
    assert offloader.calls == [call for step in steps for call in step]


def _context() -> tuple[Any, Any, Any]:
    requests, token_ids = torch.tensor([1]), torch.tensor([-1], dtype=torch.int32)
    return requests.numpy(), torch.zeros(1, dtype=torch.uint8).numpy(), token_ids.numpy()


@pytest.mark.parametrize(
    ("num_experts_that_fit", "num_slots"), [(TOP_K, TOP_K), (7, 7), (1000, LAYERS * EXPERTS)]
)
def test_an_automatic_budget_takes_what_is_left_and_no_more_than_all(
    num_experts_that_fit: int, num_slots: int, loaded: LoadedModel
) -> None:
    free_bytes = (num_experts_that_fit + 1) * loaded.layout.blob_bytes - 1
    with open_offloader(loaded, OffloadSettings(), free_bytes=free_bytes) as offloader:
        assert len(offloader.arena) == num_slots


def test_too_little_for_a_token_is_a_matter_of_capacity(loaded: LoadedModel) -> None:
    too_few = TOP_K * loaded.layout.blob_bytes - 1
    with pytest.raises(CapacityError, match=rf"auto: {too_few} bytes are left"):
        open_offloader(loaded, OffloadSettings(), free_bytes=too_few)


def test_a_fixed_budget_does_not_look_at_memory(loaded: LoadedModel) -> None:
    settings = OffloadSettings(budget=Budget(num_experts=5))
    with open_offloader(loaded, settings, free_bytes=0) as offloader:
        assert len(offloader.arena) == 5


def test_a_share_of_the_host_is_left_to_others() -> None:
    gib = 2**30
    assert free_host_bytes(0, 1, 4 * gib) == 4 * gib - RESERVE_BYTES
    assert free_host_bytes(gib, 2, 100 * gib) == 45 * gib - gib
    assert free_host_bytes(0, 1, gib // 2) == 0
