"""The application on a real cluster, over the stub runner: answers, losses, leftovers."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fmoe_ray.config import ModelSettings, Settings, load_settings
from fmoe_ray.engine.stub_runner import StubBackend
from fmoe_ray.errors import CapacityError, CheckpointNotFoundError

pytestmark = pytest.mark.ray

HELLO = [{"role": "user", "content": "hi"}]
TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class BrokenBackend(StubBackend):
    def check(self, settings: Settings) -> None:
        raise CheckpointNotFoundError("no checkpoint at nowhere; give model.path a folder")


def within(seconds: float, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def handle(cluster: str) -> Iterator[Any]:
    from ray import serve

    from fmoe_ray.actors.app import build_with

    application = build_with(load_settings(TINY), StubBackend(step_s=0.02))
    yield serve.run(application, name="stub", route_prefix="/stub")
    serve.delete("stub")


@pytest.fixture
def client(cluster: str, handle: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{cluster}/stub", timeout=30) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, **fields}


def test_the_application_answers_over_http(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=body())
    assert response.json()["choices"][0]["message"]["content"] == "abcdefghijklmnopqrstuvwxyz"
    assert response.json()["usage"]["fmoe"]["misses"] == 9 + 26


def test_tokens_are_streamed_as_they_are_made(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as response:
        arrivals = [time.monotonic() for line in response.iter_lines() if line]
    assert len(arrivals) > 10
    assert arrivals[-1] - arrivals[0] > 0.2  # 27 steps of 0.02 s


def test_errors_pass_the_proxy_as_they_are(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=body(max_tokens=-1))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_a_client_that_leaves_frees_its_slot(client: httpx.Client) -> None:
    request = body(stream=True, ignore_eos=True)
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        next(response.iter_lines())
        within(5, lambda: client.get("/health").json()["num_running"] == 1)
    within(5, lambda: client.get("/health").json()["num_running"] == 0)


def test_the_replica_sees_no_gpu(handle: Any) -> None:
    assert handle.environment.remote().result(timeout_s=10)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_killed_shard_is_503_or_an_error_event_at_once_and_then_replaced(
    client: httpx.Client, handle: Any
) -> None:
    before = client.get("/health").json()["replica"]
    (pid,) = handle.shard_pids.remote().result(timeout_s=10)
    long = body(ignore_eos=True, max_tokens=4000)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, "/v1/chat/completions", json=long)
        streamed = pool.submit(client.post, "/v1/chat/completions", json={**long, "stream": True})
        within(5, lambda: client.get("/health").json()["num_running"] == 2)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        responses = whole.result(10), streamed.result(10)
    assert time.monotonic() - killed < 3  # 0.05 s on an idle machine
    assert [response.status_code for response in responses] == [503, 200]
    for response in responses:
        assert "expert shard 0 died" in response.text
    assert "[DONE]" not in responses[1].text

    def is_replaced() -> bool:
        response = client.get("/health")
        return response.status_code == 200 and response.json()["replica"] != before

    within(30, is_replaced)
    assert client.post("/v1/chat/completions", json=body()).status_code == 200


def test_what_is_missing_is_in_the_status_of_the_application(cluster: str) -> None:
    from ray import serve

    from fmoe_ray.actors.app import build_with

    with pytest.raises(RuntimeError):
        serve.run(build_with(Settings(), BrokenBackend()), name="broken", route_prefix="/broken")
    message = serve.status().applications["broken"].deployments["Replica"].message
    assert "no checkpoint at nowhere; give model.path a folder" in message
    serve.delete("broken")


def test_gpus_that_no_node_has_are_refused_at_once(cluster: str) -> None:
    from fmoe_ray.actors.app import build_with

    settings = Settings(model=ModelSettings(device="cuda"))
    with pytest.raises(CapacityError, match=r"1 GPUs are needed on one node, 0 are there"):
        build_with(settings, StubBackend())


def test_the_builder_takes_the_settings_of_the_file(cluster: str) -> None:
    """Serve reads the annotation as a class; a string would silently give it a dictionary."""
    from fmoe_ray.actors import app

    assert app.build_app.__annotations__["args"] is Settings


def test_ray_exports_the_numbers_of_the_engine(client: httpx.Client) -> None:
    import ray

    client.post("/v1/chat/completions", json=body())
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def exported(name: str, **labels: str) -> float:
        """0 where there is none; of this application's replica that lives now."""
        replica = client.get("/health").json()["replica"]
        wanted = {"application": "stub", "replica": replica, "model": "tiny", **labels}
        for line in httpx.get(url).text.splitlines():
            found, _, value = line.rpartition(" ")
            if found.startswith(f"ray_{name}{{") and all(
                f'{key}="{label}"' in found for key, label in wanted.items()
            ):
                return float(value)
        return 0.0

    def own(sample: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{sample} ")).split()[-1])

    within(20, lambda: exported("fmoe_steps_total") == own("fmoe_steps_total") > 0)
    for name, labels in (
        ("fmoe_experts_total", {"result": "hit"}),
        ("fmoe_experts_total", {"result": "miss"}),
        ("fmoe_bytes_total", {"cause": "on_demand"}),
        ("fmoe_requests_total", {"finish_reason": "stop"}),
        ("fmoe_generated_tokens_total", {}),
        ("fmoe_ttft_seconds_count", {}),
        ("fmoe_tpot_seconds_count", {}),
        ("fmoe_queue_seconds_count", {}),
    ):
        inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
        sample = f"{name}{{{inner}}}" if labels else name
        assert exported(name, **labels) == own(sample) > 0, name

    def has_gauges() -> bool:  # Ray exports a gauge while steps are computed
        client.post("/v1/chat/completions", json=body())
        return exported("fmoe_expert_slots") == 4 and exported("fmoe_kv_slots") == 16

    within(20, has_gauges)


def test_nothing_is_left_of_a_deleted_application(cluster: str) -> None:
    import ray
    from ray import serve
    from ray.util import placement_group_table

    from fmoe_ray.actors.app import build_with

    application = build_with(load_settings(TINY), StubBackend())
    handle = serve.run(application, name="brief", route_prefix="/brief")
    (pid,) = handle.shard_pids.remote().result(timeout_s=10)
    free = ray.available_resources()["CPU"]
    groups = _created_groups(placement_group_table())
    serve.delete("brief")
    within(10, lambda: not Path(f"/proc/{pid}").exists())
    within(10, lambda: _created_groups(placement_group_table()) == groups - 1)
    within(10, lambda: ray.available_resources()["CPU"] > free + 1)


def _created_groups(table: dict[str, Any]) -> int:
    return sum(group["state"] == "CREATED" for group in table.values())
