"""Refuses settings that would be ignored: by the chosen policy, or beside another setting.

Knows no model and no machine.
"""

from fmoe_ray.config import OffloadSettings, Settings
from fmoe_ray.errors import ConfigError
from fmoe_ray.policy.table import find_policy, list_policies


def check_settings(settings: Settings, device: str | None = None) -> None:
    """Raises ConfigError for an unknown policy, and for the first setting without effect.

    `device` is what `model.device: auto` comes to, where that is known.
    """
    _check_policy(settings.offload)
    _check_device(settings, device or settings.model.device)
    _check_routing(settings)


def unused_settings(settings: OffloadSettings) -> list[str]:
    """What was given explicitly though the policy ignores it. Raises ConfigError for an unknown
    policy.
    """
    used = set(find_policy(settings.policy).parameters)
    sometimes = {name for info in list_policies() for name in info.parameters}
    given = {name for name in settings.model_fields_set if getattr(settings, name) is not None}
    return sorted((sometimes - used) & given)


def _check_policy(offload: OffloadSettings) -> None:
    unused = unused_settings(offload)
    if unused:
        known = ", ".join(find_policy(offload.policy).parameters) or "none of them"
        raise ConfigError(
            f"offload.{unused[0]} has no effect on policy {offload.policy} (it uses {known}); "
            "remove it, or choose a policy that uses it"
        )


def _check_device(settings: Settings, device: str) -> None:
    gbps = settings.offload.link_gbps
    if device == "cuda" and gbps is not None:
        raise ConfigError(f"offload.link_gbps {gbps:g} slows a CPU's copies only; remove it")
    # Off it changes nothing on a CPU, as asked; and a file with `auto` is for both.
    engine = settings.engine
    wants_graphs = "cuda_graphs" in engine.model_fields_set and engine.cuda_graphs
    if settings.model.device == "cpu" and wants_graphs:
        raise ConfigError(
            "engine.cuda_graphs has no effect with model.device: cpu; remove it, or compute on a "
            "GPU"
        )


def _check_routing(settings: Settings) -> None:
    routing, offload = settings.routing, settings.offload
    if not routing.by_experts:
        if "max_lead" in routing.model_fields_set:
            raise ConfigError(
                "routing.max_lead has no effect without routing.by_experts: true; remove it, or "
                "set that"
            )
        return
    if "share_maps" not in find_policy(offload.policy).parameters:
        raise ConfigError(
            f"routing.by_experts: policy {offload.policy} learns no expert maps to route by; "
            "remove it, or choose a policy that does, such as fmoe+"
        )
    if not offload.share_maps:
        raise ConfigError(
            "routing.by_experts reads the shared expert maps, and offload.share_maps is false; "
            "remove one of the two"
        )
