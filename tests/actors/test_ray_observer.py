"""What the replica tells Ray's metrics."""

from fmoe_ray.actors.metrics import RayObserver
from fmoe_ray.engine.stub_runner import StubRunner


def test_a_model_name_of_any_letters_is_a_tag_that_rays_exporter_can_write() -> None:
    observer = RayObserver("modèle/é", StubRunner().info)
    assert observer._tags["model"].isascii()
    assert RayObserver("tiny", StubRunner().info)._tags == {"model": "tiny"}
