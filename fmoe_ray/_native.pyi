"""Native core of fmoe_ray."""



class Geometry:
    """Layers, experts per layer, experts per token."""

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...
