"""A cluster that adds nodes with two logical GPUs each, as many as the load asks for."""

import os
import threading

import httpx
import pytest

from clusters.fake_gpu_cluster import fake_gpu_cluster
from clusters.waiting import free_port, within
from fmoe_ray.config import Settings, parse_settings
from fmoe_ray.engine.stub_runner import StubBackend
from fmoe_ray.errors import CapacityError


def gpu_settings(num_shards: int) -> Settings:
    return parse_settings(
        {
            "model": {"path": "tiny", "device": "cuda"},
            "engine": {"request_timeout_s": 300},
            "shards": {"num_shards": num_shards, "wait_for_nodes": True, "start_timeout_s": 60},
        }
    )


def follow_the_load() -> None:
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1",
    )
    import ray
    from ray import serve

    from fmoe_ray.actors.app import build_with
    from fmoe_ray.actors.replica import ReplicaDeployment
    from fmoe_ray.actors.resources import placement_options

    def num_gpu_nodes() -> int:
        return sum(node["Alive"] and "GPU" in node["Resources"] for node in ray.nodes())

    def num_running() -> int:
        deployment = serve.status().applications["gpu"].deployments["Replica"]
        return int(deployment.replica_states.get("RUNNING", 0))

    with fake_gpu_cluster({"CPU": 6, "GPU": 2}, max_nodes=3, idle_s=10) as address:
        ray.init(address, log_to_driver=False)
        try:
            with pytest.raises(
                CapacityError, match="3 GPUs are needed on one node, 0 are there, and no"
            ):
                build_with(gpu_settings(3), StubBackend())
            assert num_gpu_nodes() == 0
            port = free_port()
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            settings = gpu_settings(2)
            deployment = ReplicaDeployment.options(
                **placement_options(settings),
                max_ongoing_requests=32,
                autoscaling_config={
                    "min_replicas": 1,
                    "max_replicas": 3,
                    "upscale_delay_s": 2,
                    "downscale_delay_s": 10,
                    "look_back_period_s": 15,
                    "metrics_interval_s": 2,
                    "policy": {
                        "policy_function": "fmoe_ray.actors.autoscaling:TokenLoadPolicy",
                        "policy_kwargs": {"target_tokens": 200},
                    },
                },
            )
            application = deployment.bind(settings, StubBackend(step_s=0.1))
            serve.run(application, name="gpu", route_prefix="/")
            assert (num_gpu_nodes(), num_running()) == (1, 1)
            with load(f"http://127.0.0.1:{port}"):
                within(180, lambda: num_running() == 3)
                assert num_gpu_nodes() == 3
            within(180, lambda: num_running() == 1 and num_gpu_nodes() == 1)
            serve.shutdown()
        finally:
            ray.shutdown()


class load:
    """Six requests of 100 prompt tokens in flight, whatever happens to them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(6)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {
            "model": "tiny",
            "prompt": "a" * 100,
            "max_tokens": 60,
            "ignore_eos": True,
            "seed": 1,
        }
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._is_over.is_set():
                client.post("/v1/completions", json=body)
