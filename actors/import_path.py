"""What a file that is not trusted yet names by an import path."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_IMPORTED_BY_SCHEMA = ("policy_function", "request_router_class")


def without_imports(value: Any) -> Any:
    """A copy without the paths that Serve's schema imports while it validates them."""
    if isinstance(value, dict):
        return {k: without_imports(v) for k, v in value.items() if k not in _IMPORTED_BY_SCHEMA}
    return [without_imports(item) for item in value] if isinstance(value, list) else value


def look_up(path: str) -> Any:
    """What an import path names in this package; None for one of another, which has to exist.

    Raises ImportError, AttributeError or ValueError where there is no such thing.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    package = module.partition(".")[0]
    if package == "fmoe_ray":
        return getattr(import_module(module), name)
    if find_spec(package) is None:
        raise ImportError(f"no package {package!r} is installed here")
    return None
