"""Decode steps: one token a row, the layers compiled once, each shape captured as one CUDA graph
with the offloading inside.

A shape is a bucket: rows padded up to a power of two, keys up to a power of four. Rows that pad
write into a KV slot of their own and ask for no expert. The eager way runs the same kernels on the
same buckets, so the logits are the same bits.

Shape letters: B rows of the bucket, R rows that count, V vocabulary, D and Q as in the kernels.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fmoe_ray.engine.gpu.slot_experts import GraphGate, SlotExperts
from fmoe_ray.engine.kv_cache import KVCache
from fmoe_ray.engine.messages import Row
from fmoe_ray.gates import CudaGates
from fmoe_ray.kernels import fuse, ops
from fmoe_ray.kernels.attention import decode_attention

logger = logging.getLogger(__name__)

SHORTEST = 256
"""Keys of the smallest bucket."""


class _PassThrough:
    """The `cache` of a decode step: keys and values are stored where attention is computed."""

    is_compileable = False  # transformers asks

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def get_seq_length(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: object) -> tuple[int, int]:
        return query_length, 0


class _Inputs:
    """What a bucket's graph reads, at addresses that never change; filled by one copy."""

    def __init__(self, batch: int, padding_slot: int, device: torch.device) -> None:
        self._padding_slot = padding_slot
        self._host = torch.zeros((4, batch), dtype=torch.int64, pin_memory=True)
        self._device = torch.zeros((4, batch), dtype=torch.int64, device=device)
        self.slots = torch.zeros(batch, dtype=torch.int32, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int32, device=device)
        self.live = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, rows: Sequence[Row]) -> None:
        self._host[0] = 0
        self._host[1] = 0
        self._host[2] = self._padding_slot
        self._host[3] = len(rows)
        count = len(rows)
        if rows:
            self._host[0, :count] = torch.tensor([row.tokens[0] for row in rows])
            self._host[1, :count] = torch.tensor([row.start for row in rows])
            self._host[2, :count] = torch.tensor([row.slot for row in rows])
        self._device.copy_(self._host, non_blocking=True)

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, position_ids), int64 [1, B]; part of the graph."""
        self.positions.copy_(self._device[1])
        self.slots.copy_(self._device[2])
        self.live.copy_(self._device[3, :1])
        return self._device[0:1], self._device[1:2]


class DecodeStep:
    """Runs steps of one token a row. One step at a time, on one thread."""

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        experts: SlotExperts,
        *,
        gates: CudaGates | None,
        num_slots: int,
        max_batch: int,
        max_experts_at_once: int,
        top_k: int,
        num_experts: int,
        device: torch.device,
    ) -> None:
        """`gates` None runs every step eagerly. `num_slots` KV slots; the cache has one more, for
        padding. `max_experts_at_once` experts fit on the device.
        """
        self._model = model
        self._cache = cache
        self._experts = experts
        self._gates = gates
        self._num_slots = num_slots
        self._max_batch = max_batch
        self._max_experts = max_experts_at_once
        self._top_k = top_k
        self._num_experts = num_experts
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._inputs: dict[int, _Inputs] = {}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._bound: tuple[_Inputs, int] | None = None
        self.graph_bytes = 0
        """Device memory that captured graphs hold."""
        self._is_uncapturable = False
        _keep_frequencies(model, device)
        self._layers = _compile_layers(model)

    def close(self) -> None:
        """Gives up the graphs and leaves the model's layers as they were."""
        self._graphs.clear()
        self._bound = None
        for layer in self._layers:
            layer._compiled_call_impl = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def takes(self, rows: Sequence[Row]) -> bool:
        """Every row has exactly one token, at a position that has a history."""
        return len(rows) <= self._max_batch and all(
            len(row.tokens) == 1 and row.start > 0 for row in rows
        )

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """[R, V] logits; valid until the next step. Raises EngineError if experts did not come."""
        batch = _power(len(rows), 2, 1)
        longest = max(row.start for row in rows) + 1
        length = min(_power(longest, 4, SHORTEST), self._cache.max_context)
        with torch.cuda.stream(self._stream), ops.bind(self, decodes=True):
            inputs = self._inputs.get(batch)
            if inputs is None:
                inputs = self._inputs[batch] = _Inputs(batch, self._num_slots, self._device)
            self._bound = inputs, length
            if self._can_replay(batch, length, inputs):
                assert self._gates is not None
                logits_BV = self._replay(self._gates, rows, batch, length, inputs)
            else:
                inputs.fill(rows)
                self._experts.begin_step([1] * len(rows))
                logits_BV = self._run(inputs)
            self._stream.synchronize()
        return logits_BV[: len(rows)]

    def _fits(self, batch: int) -> bool:
        """A layer's experts are there all at once, whatever the gate chooses."""
        return min(batch * self._top_k, self._num_experts) <= self._max_experts

    def _can_replay(self, batch: int, length: int, inputs: _Inputs) -> bool:
        """Captures the bucket's graph the first time. A model that cannot be captured (it copies
        from the host in its forward pass, say) runs eagerly from then on.
        """
        if self._gates is None or self._is_uncapturable or not self._fits(batch):
            return False
        if (batch, length) not in self._graphs:
            try:
                self._graphs[batch, length] = self._capture(self._gates, inputs)
            except RuntimeError as error:
                logger.warning("decode steps are launched kernel by kernel: %s", error)
                self._is_uncapturable = True
        return not self._is_uncapturable

    def _replay(
        self, gates: CudaGates, rows: Sequence[Row], batch: int, length: int, inputs: _Inputs
    ) -> torch.Tensor:
        graph, logits_BV = self._graphs[batch, length]
        inputs.fill(rows)
        gates.begin_step(len(rows))
        try:
            graph.replay()
            self._stream.synchronize()
        finally:
            gates.end_step()
        return logits_BV

    def _capture(
        self, gates: CudaGates, inputs: _Inputs
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        before = torch.cuda.mem_get_info(self._device)[0]
        self._experts.begin_graph(GraphGate(gates=gates, live=inputs.live))
        inputs.fill([])
        for _ in range(2):  # compiles and loads every kernel; no row counts, no expert is asked for
            self._run(inputs)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits_BV = self._run(inputs)
        self.graph_bytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])
        return graph, logits_BV

    def _run(self, inputs: _Inputs) -> torch.Tensor:
        input_ids, position_ids = inputs.unpack()
        output = self._model(
            input_ids=input_ids, position_ids=position_ids, cache=_PassThrough(), use_cache=True
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    # ---- ops.StepState ----

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._bound is not None
        inputs, length = self._bound
        keys, values = self._cache.regions(layer)
        return decode_attention(
            q,
            k,
            v,
            keys,
            values,
            inputs.slots,
            inputs.positions,
            length,
            scale,
            window,
            softcap,
            sinks,
        )

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
        router_input: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        return self._experts.experts(x, ids, weights, scores, router_input, layer)


def _power(number: int, base: int, at_least: int) -> int:
    bucket = at_least
    while bucket < number:
        bucket *= base
    return bucket


def decoder_layers(model: Any, experts: Sequence[str]) -> torch.nn.ModuleList:
    """The list of layers that holds the experts modules of the given names."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and all(
            expert.startswith(f"{name}.") for expert in experts
        ):
            return module
    raise AssertionError("experts lie in no list of layers")


def _return(kept: object, *_: object) -> object:
    return kept


def _keep_frequencies(model: Any, device: torch.device) -> None:
    """Some families compute their constant rotary frequencies anew on the CPU in every pass."""
    for module in model.modules():
        compute = getattr(module, "rope_init_fn", None)
        if compute is None or module.rope_type != "default":
            continue
        frequencies, scaling = compute(module.config)
        kept = frequencies.to(device), scaling
        module.rope_init_fn = partial(_return, kept)


def _compile_layers(model: Any) -> torch.nn.ModuleList:
    """From now on the layers run compiled, except under `force_eager`."""
    experts = [
        name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")
    ]
    layers = decoder_layers(model, experts)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    for layer in layers:
        layer.compile(backend=fuse.backend, dynamic=False, fullgraph=True)
    return layers
