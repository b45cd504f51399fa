"""What the routes need to know of the replica they run in."""

from dataclasses import dataclass

from fmoe_ray.api.metrics import PrometheusObserver
from fmoe_ray.config import ServerSettings
from fmoe_ray.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    engine: Engine
    model_name: str
    replica: str
    """Says which of several replicas has answered `/health` and `/metrics`."""
    settings: ServerSettings
    metrics: PrometheusObserver
    started_at: int
    """Unix time, seconds."""
