"""Serve Mixture-of-Experts models larger than GPU memory, losslessly, by predicting the experts.

    with fmoe_ray.Client("http://127.0.0.1:8000") as client:
        print(client.chat([{"role": "user", "content": "Hello"}]).text)

Importing this package imports neither Ray nor torch nor the compiled core, nor an HTTP library.
"""

from typing import TYPE_CHECKING

from fmoe_ray.config import Budget, Settings, load_settings
from fmoe_ray.errors import FmoeError

if TYPE_CHECKING:
    from fmoe_ray.client import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Budget",
    "Client",
    "FmoeError",
    "Settings",
    "__version__",
    "load_settings",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "Client"):
        from fmoe_ray import client

        return getattr(client, name)
    raise AttributeError(f"module 'fmoe_ray' has no attribute {name!r}")
