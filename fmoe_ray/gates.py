"""The gates of a decode step that runs as one CUDA graph: the graph asks for experts through memory
that it shares with a native thread, and waits for the answer on the GPU.

The wrapper of the native gate server. Knows neither torch nor kernels: memory is an address.
"""

from fmoe_ray import _native
from fmoe_ray.cache import Geometry, Offloader


class CudaGates:
    """Answers one step at a time from an `Offloader` with slots on the same GPU.

    Per step: `Offloader.begin_iteration`, `begin_step`, launch the graph, wait for its end,
    `end_step`, `Offloader.end_iteration` (after an error `abort_iteration`).
    """

    def __init__(
        self,
        offloader: Offloader,
        geometry: Geometry,
        *,
        max_rows: int,
        device: int,
        table_address: int,
        timeout_s: float,
    ) -> None:
        """`table_address` is int32 [L, J] on the GPU: the slot of each expert, written here.

        Raises EngineError where streams of this GPU cannot wait on memory.
        """
        self._native = _native.CudaGates(
            offloader.native,
            geometry,
            max_rows=max_rows,
            device=device,
            table=table_address,
            timeout_s=timeout_s,
        )

    def chosen_address(self, layer: int) -> int:
        """int32 [max_rows, K]: the graph writes here what gate `layer` chose."""
        return self._native.chosen_address(layer)

    def probs_address(self, layer: int) -> int:
        """float32 [max_rows, J]: the graph writes here what gate `layer` thought of all experts."""
        return self._native.probs_address(layer)

    def enqueue(self, layer: int, stream: int) -> None:
        """Request and wait of a layer on a CUDA stream, which may be capturing."""
        self._native.enqueue(layer, stream)

    def begin_step(self, num_rows: int) -> None:
        """The graph is about to be launched with one token in each of `num_rows` rows."""
        self._native.begin_step(num_rows)

    def end_step(self) -> None:
        """The graph has ended. Raises EngineError if its experts could not all be served: then what
        it computed is worthless."""
        self._native.end_step()

    def close(self) -> None:
        """Ends the thread; idempotent. Before the offloader is closed."""
        self._native.close()
