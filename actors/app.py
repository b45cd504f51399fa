"""What `import_path: fmoe_ray.actors.app:build_app` in a Serve file builds.

No `from __future__ import annotations` here: Serve reads the builder's annotation as a class.
"""

import ray
from ray import serve

from fmoe_ray.actors.cluster import check_cluster
from fmoe_ray.actors.replica import ReplicaDeployment
from fmoe_ray.actors.resources import placement_options
from fmoe_ray.actors.router import router_options
from fmoe_ray.config import Settings
from fmoe_ray.engine.backend import Backend, ModelBackend


def build_app(args: Settings) -> serve.Application:
    """Raises what `actors.cluster.check_cluster` raises: Serve shows it as the status."""
    return build_with(args, ModelBackend())


def build_with(settings: Settings, backend: Backend) -> serve.Application:
    """The application over any backend; limits and replica counts come from the Serve file."""
    settings = _with_device(settings)
    check_cluster(settings, backend)
    options = {**placement_options(settings), **router_options(settings)}
    return ReplicaDeployment.options(**options).bind(settings, backend)


def _with_device(settings: Settings) -> Settings:
    """Decides `auto`, which the placement of the shards depends on."""
    if settings.model.device != "auto":
        return settings
    device = "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
    model = settings.model.model_copy(update={"device": device})
    return settings.model_copy(update={"model": model})
