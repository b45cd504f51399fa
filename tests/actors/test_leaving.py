"""What a replica of the demonstration model leaves behind when it is shut down: its files."""

import time
from pathlib import Path

import httpx
import pytest

from fmoe_ray.config import Settings, load_settings
from fmoe_ray.maps.store import MapStore
from fmoe_ray.trace.format import load_trace

pytestmark = pytest.mark.ray

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
NUM_TOKENS = 12


def settings_with(folder: Path) -> Settings:
    settings = load_settings(TINY)
    changes = {
        "policy": "fmoe",
        "share_maps": False,
        "store_path": str(folder / "maps"),
        "record_path": str(folder / "trace.npz"),
    }
    offload = settings.offload.model_copy(update=changes)
    return settings.model_copy(update={"offload": offload})


def test_maps_and_traces_are_written_when_a_replica_leaves(cluster: str, tmp_path: Path) -> None:
    from ray import serve

    from fmoe_ray.actors.app import build_app

    for round_number in (1, 2):  # the second begins with the maps of the first
        application = build_app(settings_with(tmp_path))
        serve.run(application, name="leaving", route_prefix="/leaving")
        body = {"model": "tiny", "prompt": f"Tale {round_number}", "max_tokens": NUM_TOKENS}
        url = f"{cluster}/leaving/v1/completions"
        response = httpx.post(url, json={**body, "ignore_eos": True}, timeout=60)
        usage = response.json()["usage"]
        serve.delete("leaving")
        deadline = time.monotonic() + 30
        while len(traces := list(tmp_path.glob("trace.*.npz"))) < round_number:
            assert time.monotonic() < deadline, "no trace was written"
            time.sleep(0.05)
        assert len(MapStore.load(tmp_path / "maps")) == round_number * NUM_TOKENS
    lengths = [load_trace(trace).num_tokens for trace in traces]
    assert lengths == [usage["prompt_tokens"] + NUM_TOKENS - 1] * 2
