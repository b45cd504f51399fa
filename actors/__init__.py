"""Ray actors of fmoe_ray. The folder sits at the top; its one import name is fmoe_ray.actors."""

if __name__ != "fmoe_ray.actors":
    raise ImportError(f"imported as {__name__!r}; use fmoe_ray.actors")
