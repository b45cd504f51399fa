"""Records the routing of every step into a trace: what the gates said, layer by layer, row by row.

Shape letters: T tokens of the step, L layers, K experts of a token, J experts of a layer, H hidden
size.
"""

from collections.abc import Sequence

import torch

from fmoe_ray.engine.messages import Row
from fmoe_ray.trace.recorder import TraceRecorder


class StepRecorder:
    """Gathers a step's layers, then hands them row by row to the trace. One step at a time."""

    def __init__(self, path: str, *, num_experts: int, max_bytes: int) -> None:
        self._trace = TraceRecorder(path, num_experts=num_experts, max_bytes=max_bytes)
        self._num_experts = num_experts
        self._layers: list[tuple[torch.Tensor, ...]] = []

    def begin_step(self) -> None:
        """Forgets what a failed step left."""
        self._layers.clear()

    def add_layer(
        self,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        probs_TJ: torch.Tensor,
        speculative_TJ: torch.Tensor | None,
    ) -> None:
        """In the order of layers; the speculative gate is of the layer that comes next."""
        if speculative_TJ is None:
            speculative_TJ = torch.zeros_like(probs_TJ)
        self._layers.append((index_TK, weights_TK, probs_TJ, speculative_TJ))

    def end_step(
        self, rows: Sequence[Row], is_prefill_R: Sequence[bool], embeddings_TH: torch.Tensor
    ) -> None:
        """Raises TraceError for rows that do not fit those before."""
        index, weights, probs, following = (
            torch.stack(parts, dim=1).float() for parts in zip(*self._layers, strict=True)
        )
        # A layer's speculative gate was computed one layer earlier; layer 0 has none.
        speculative = torch.cat([torch.zeros_like(following[:, :1]), following[:, :-1]], dim=1)
        begin = 0
        for row, is_prefill in zip(rows, is_prefill_R, strict=True):
            part = slice(begin, begin + len(row.tokens))
            self._trace.record(
                row.request_id,
                is_prefill=is_prefill,
                expert_ids=index[part].int().cpu().numpy(),
                weights=weights[part].cpu().numpy(),
                token_ids=torch.tensor(row.tokens).numpy(),
                probs=probs[part].cpu().numpy(),
                spec_probs=speculative[part].cpu().numpy(),
                embeddings=embeddings_TH[part].float().cpu().numpy(),
            )
            begin = part.stop

    def close(self) -> None:
        """Writes the trace. Raises TraceError if it cannot be written."""
        self._trace.write()
