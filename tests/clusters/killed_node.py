"""A cluster of two nodes, of which the one that holds the replica dies."""

import os
import shutil
import tempfile

from clusters.waiting import free_port, is_ok, within
from fmoe_ray.config import parse_settings
from fmoe_ray.engine.stub_runner import StubBackend


def kill_a_node() -> None:
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_health_check_initial_delay_ms="500",
        RAY_health_check_period_ms="500",
        RAY_health_check_failure_threshold="5",
    )
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    from fmoe_ray.actors.app import build_with

    def nodes_of_groups() -> list[str]:
        groups = placement_group_table().values()
        return [
            node
            for group in groups
            if group["state"] == "CREATED"
            for node in set(group["bundles_to_node_id"].values())
        ]

    folder, port = tempfile.mkdtemp(prefix="fmoe"), free_port()
    memory = {"object_store_memory": 100_000_000}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "gcs_server_port": free_port(),
            "include_dashboard": False,
            "temp_dir": folder,
            **memory,
        },
    )
    try:
        nodes = [cluster.add_node(num_cpus=2, **memory) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = parse_settings({"model": {"device": "cpu"}, "shards": {"num_shards": 2}})
        serve.run(build_with(settings, StubBackend()), name="stub", route_prefix="/")
        health = f"http://127.0.0.1:{port}/health"
        before = within(20, lambda: is_ok(health))["replica"]
        (where,) = nodes_of_groups()
        dead = next(node for node in nodes if node.node_id == where)
        cluster.remove_node(dead, allow_graceful=False)
        within(90, lambda: (now := is_ok(health)) is not None and now["replica"] != before)
        within(20, lambda: nodes_of_groups() not in ([], [where]))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
