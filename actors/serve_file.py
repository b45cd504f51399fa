"""Checks a Serve configuration file without a cluster, more strictly than Serve does.

Serve ignores keys it does not know; here they are mistakes. Nothing that a file names is imported
or called but what is this package's own: a file is checked before it is trusted.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from fmoe_ray.actors.autoscaling import TokenLoadPolicy
from fmoe_ray.actors.import_path import look_up, without_imports
from fmoe_ray.actors.replica import ReplicaDeployment
from fmoe_ray.config import Settings, describe
from fmoe_ray.errors import ConfigError
from fmoe_ray.policy import check_settings

_PLACED_BY_BUILDER = ("placement_group_bundles", "placement_group_strategy", "ray_actor_options")


def find_serve_mistakes(document: object) -> list[str]:
    """One line a mistake; empty if it can be deployed as far as can be told offline."""
    if not isinstance(document, dict) or not document.get("applications"):
        return ["no applications: list; is it a Serve configuration file?"]
    try:
        ServeDeploySchema.model_validate(without_imports(document))
    except ValidationError as error:
        return [describe(error)]
    except (AttributeError, TypeError) as error:  # its validators meet a part of the wrong type
        return [f"Serve refuses it: {error}"]
    mistakes = [f"{key}: Serve does not know this key" for key in _unknown_keys(document)]
    for index, application in enumerate(document["applications"]):
        where = f"applications.{index}"
        mistakes += [f"{where}.{mistake}" for mistake in _application_mistakes(application)]
    return mistakes


def _unknown_keys(document: dict[str, Any]) -> Iterator[str]:
    yield from _unknown(document, ServeDeploySchema, "")


def _unknown(value: Any, annotation: Any, path: str) -> Iterator[str]:
    """Keys of `value` for which the pydantic model in `annotation` has no field."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        models = [arg for arg in get_args(annotation) if _holds_model(arg)]
        if len(models) == 1:
            yield from _unknown(value, models[0], path)
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, get_args(annotation)[0], f"{path}.{index}")
    elif _is_model(annotation) and isinstance(value, dict):
        for key, item in value.items():
            here = f"{path}.{key}".lstrip(".")
            field = annotation.model_fields.get(key)
            if field is None:
                yield here
            else:
                yield from _unknown(item, field.annotation, here)


def _is_model(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def _holds_model(annotation: Any) -> bool:
    return _is_model(annotation) or any(_holds_model(arg) for arg in get_args(annotation))


def _application_mistakes(application: dict[str, Any]) -> Iterator[str]:
    import_path = str(application["import_path"])
    try:
        builder = look_up(import_path)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"import_path: {import_path} cannot be imported: {error}"
        return
    if builder is None:
        return
    yield from _argument_mistakes(builder, application.get("args") or {})
    for deployment in application.get("deployments") or []:
        yield from _deployment_mistakes(deployment)


def _argument_mistakes(builder: Any, args: dict[str, Any]) -> Iterator[str]:
    if not inspect.isfunction(builder):
        return
    parameters = list(inspect.signature(builder).parameters.values())
    if len(parameters) != 1 or not _is_model(parameters[0].annotation):
        return
    try:
        settings = parameters[0].annotation.model_validate(args)
        if isinstance(settings, Settings):
            check_settings(settings)
    except ValidationError as error:
        yield f"args: {describe(error)}"
    except ConfigError as error:
        yield f"args: {error}"


def _deployment_mistakes(deployment: dict[str, Any]) -> Iterator[str]:
    name = deployment["name"]
    if name != ReplicaDeployment.name:
        yield f"deployments: there is no deployment {name!r}; write {ReplicaDeployment.name}"
    for key in _PLACED_BY_BUILDER:
        if key in deployment:
            yield f"deployments.{name}.{key}: follows from args.shards; remove it"
    for key in ("max_ongoing_requests", "max_queued_requests"):
        if deployment.get(key, -1) == -1:
            yield f"deployments.{name}.{key}: without a limit overload is never refused; set it"
    where = f"deployments.{name}.autoscaling_config"
    for mistake in _scaling_mistakes(deployment.get("autoscaling_config") or {}):
        yield f"{where}.{mistake}"
    router = (deployment.get("request_router_config") or {}).get("request_router_class")
    if router is not None:
        try:
            look_up(str(router))
        except (ImportError, AttributeError, ValueError) as error:
            where = f"deployments.{name}.request_router_config.request_router_class"
            yield f"{where}: {router} cannot be imported: {error}"


def _scaling_mistakes(scaling: dict[str, Any]) -> Iterator[str]:
    policy = scaling.get("policy") or {}
    if not isinstance(policy, dict):
        yield f"policy: must be a mapping, got {policy!r}"
        return
    path = str(policy.get("policy_function", ""))
    if not path:
        return
    if "target_ongoing_requests" in scaling:
        yield "target_ongoing_requests: policy decides instead; remove one of the two"
    try:
        if look_up(path) is TokenLoadPolicy:
            TokenLoadPolicy(**(policy.get("policy_kwargs") or {}))
    except (ImportError, AttributeError, ValueError) as error:
        yield f"policy.policy_function: {path} cannot be imported: {error}"
    except (TypeError, ConfigError) as error:
        yield f"policy.policy_kwargs: {error}"
