"""A local cluster whose autoscaler adds and removes nodes with logical GPUs.

`ray.cluster_utils.AutoscalingCluster` runs `ray stop --force`, which would end every Ray on this
machine, and needs a file that the wheel lacks. This one ends its own processes only.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusters.waiting import free_port

_HEAD_ID = "f" * 51 + "00000"
_HEAD_TYPE = "ray.head.default"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 40.0


@contextmanager
def fake_gpu_cluster(
    resources: dict[str, float], *, max_nodes: int, idle_s: float
) -> Iterator[str]:
    """Yields the address of a head without CPUs; up to `max_nodes` nodes of these resources."""
    from ray._private.services import get_node_ip_address

    with tempfile.TemporaryDirectory(prefix="fmoe", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), free_port()
        address = f"{get_node_ip_address()}:{port}"
        config = folder / "autoscaling.json"
        config.write_text(json.dumps(_autoscaling(address, resources, max_nodes, idle_s)))
        log = folder / "head.log"
        with log.open("w") as output:
            head = subprocess.Popen(
                _command(config, port, folder),
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _await_start(head, log)
            yield address
        finally:
            _end_session(head)


def _autoscaling(
    address: str, resources: dict[str, float], max_nodes: int, idle_s: float
) -> dict[str, Any]:
    types = {
        "gpu": {
            "resources": resources,
            "node_config": {},
            "min_workers": 0,
            "max_workers": max_nodes,
        },
        _HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
    }
    empty_lists = (
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
    )
    return {
        "cluster_name": "fake",
        "max_workers": max_nodes,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": _HEAD_ID,
        },
        "available_node_types": types,
        "head_node_type": _HEAD_TYPE,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in empty_lists},
    }


def _command(config: Path, port: int, folder: Path) -> list[str]:
    options = {
        "port": port,
        "temp-dir": folder,
        "num-cpus": 0,
        "autoscaling-config": config,
        "include-dashboard": "true",  # the autoscaler's monitor reports through it
        "dashboard-host": "127.0.0.1",
        "dashboard-port": free_port(),
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
        "object-store-memory": 200_000_000,
    }
    ray = Path(sys.executable).with_name("ray")
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [str(ray), "start", "--head", "--block", *flags]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {
        **kept,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
    }


def _await_start(head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "Ray runtime started" not in (text := log.read_text()):
        assert head.poll() is None and time.monotonic() < deadline, text[-2000:]
        time.sleep(0.2)


def _end_session(head: subprocess.Popen[bytes]) -> None:
    """The head's session holds all nodes and workers; nobody else is in it."""
    os.killpg(head.pid, signal.SIGTERM)
    try:
        head.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(head.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    head.wait()
