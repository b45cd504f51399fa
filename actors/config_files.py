"""Checks a file of `configs/` without a cluster, whatever kind it is."""

import os
from pathlib import Path

from fmoe_ray.actors.cluster_file import find_cluster_mistakes
from fmoe_ray.actors.rayservice_file import find_rayservice_mistakes
from fmoe_ray.actors.serve_file import find_serve_mistakes
from fmoe_ray.config import parse_yaml
from fmoe_ray.errors import ConfigError


def find_mistakes(path: str | os.PathLike[str]) -> list[str]:
    """One line a mistake; empty if the file can be used as far as can be told offline.

    Serve configuration files, cluster files for `ray up`, and KubeRay's RayService manifests.
    """
    try:
        document = parse_yaml(Path(path).read_bytes())
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    except ConfigError as error:
        return [str(error)]
    if isinstance(document, dict):
        if "kind" in document:
            return find_rayservice_mistakes(document)
        if "cluster_name" in document:
            return find_cluster_mistakes(document)
    return find_serve_mistakes(document)
