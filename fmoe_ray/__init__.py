"""Serve Mixture-of-Experts models larger than GPU memory, losslessly, by predicting the experts.

Importing this package imports neither Ray nor torch nor the compiled core.
"""

from fmoe_ray.config import Budget, Settings, load_settings
from fmoe_ray.errors import FmoeError

__all__ = ["Budget", "FmoeError", "Settings", "__version__", "load_settings"]
__version__ = "0.1.0"
