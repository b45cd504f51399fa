"""Carries out steps in this process: model, KV slots, random state and experts of one device."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from fmoe_ray.cache import CacheCounters, HostStore, IterationStats, Offloader
from fmoe_ray.config import Settings
from fmoe_ray.engine.gpu.assemble import GpuParts, assemble_gpu, free_bytes, prepare_process
from fmoe_ray.engine.gpu.link import log_link
from fmoe_ray.engine.host_memory import free_host_bytes
from fmoe_ray.engine.learned_maps import LearnedMaps
from fmoe_ray.engine.messages import (
    ExpertCounts,
    Row,
    RowResult,
    Sampling,
    StepPlan,
    StepResult,
    StepStats,
)
from fmoe_ray.engine.offloaded_experts import OffloadedExperts, StepExperts, open_offloader
from fmoe_ray.engine.packed_model import PackedModel
from fmoe_ray.engine.pooling import Pooling, pool_rows
from fmoe_ray.engine.process_group import open_group
from fmoe_ray.engine.runner import RunnerInfo
from fmoe_ray.engine.sampling import Sampler
from fmoe_ray.engine.seat import ONLY_SEAT, Seat
from fmoe_ray.engine.shard_group import ALONE, ShardGroup
from fmoe_ray.engine.step_recorder import StepRecorder
from fmoe_ray.errors import EngineError
from fmoe_ray.models.context import context_limit
from fmoe_ray.models.device import choose_device, choose_dtype
from fmoe_ray.models.experts import NoExperts, bind_experts
from fmoe_ray.models.loader import LoadedModel, load_model
from fmoe_ray.models.router import RouterTap
from fmoe_ray.models.weights import Progress
from fmoe_ray.policy import PolicyParts
from fmoe_ray.trace.format import DECODE, PREFILL

logger = logging.getLogger(__name__)

_TELL_RESIDENT_EVERY_S = 0.5

_NO_STATS = StepStats(
    seconds=0.0,
    stall_seconds=0.0,
    bytes_on_demand=0,
    bytes_prefetched=0,
    hits=0,
    late=0,
    misses=0,
)


class StepRunner:
    """`engine.runner.Runner` on a thread of its own, so that the caller's event loop stays alive.

    Owns what it is given and closes it. Steps run in the order in which they are asked for.

    A row's attention and its experts' sums do not depend on the other rows of a step. Its matrix
    products may, in their last bits: a kernel's rounding can change with the number of rows. So
    logits are bit-identical for equal plans, whatever budget, policy and number of shards, and
    equal up to that rounding for other batches.

    All shards of a replica run the same plans. The first draws the tokens, keeps the random state,
    records traces and saves maps.
    """

    def __init__(
        self,
        *,
        model: PackedModel,
        experts: StepExperts,
        gpu: GpuParts | None,
        offloader: Offloader,
        store: HostStore,
        recorder: StepRecorder | None,
        maps: LearnedMaps | None,
        group: ShardGroup,
        info: RunnerInfo,
        pooling: Pooling,
        num_threads: int | None,
    ) -> None:
        self._model = model
        self._experts = experts
        self._gpu = gpu
        self._offloader = offloader
        self._store = store
        self._recorder = recorder
        self._maps = maps
        self._group = group
        self._info = info
        self._pooling: Pooling = pooling
        self._requests: set[int] = set()
        self._samplers: dict[int, Sampler] = {}
        self._decoding: set[int] = set()
        self._told_resident_s = -_TELL_RESIDENT_EVERY_S
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="fmoe-step",
            initializer=_use_threads,
            initargs=(num_threads,),
        )

    @classmethod
    def load(
        cls,
        settings: Settings,
        progress: Progress | None = None,
        seat: Seat = ONLY_SEAT,
        policy_parts: PolicyParts | None = None,
    ) -> "StepRunner":
        """Meets the other shards, then loads the model and its host store; `progress` gets experts
        done and experts in all.

        `policy_parts` decide instead of a new policy by the settings' name: with a predictor that
        has learned already, or written in Python.

        Raises ModelError, ConfigError for a budget below top_k experts or an unknown policy,
        CapacityError, EngineError if the shards do not meet.
        """
        _use_threads(settings.engine.num_threads)
        prepare_process()
        device = choose_device(settings.model.device)
        group = open_group(
            seat,
            device,
            meeting_timeout_s=settings.shards.meeting_timeout_s,
            timeout_s=settings.engine.step_timeout_s,
        )
        with ExitStack() as undo:
            undo.callback(group.close)
            loaded = load_model(
                settings.model.path,
                device=device,
                dtype=choose_dtype(settings.model.dtype, device),
                progress=progress,
                timeout_s=settings.shards.start_timeout_s,
            )
            undo.callback(loaded.store.close)
            runner = cls.of(loaded, settings, group, policy_parts)
            undo.pop_all()
        return runner

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        settings: Settings,
        group: ShardGroup = ALONE,
        policy_parts: PolicyParts | None = None,
    ) -> "StepRunner":
        """A runner of a loaded model, which it owns from now on, as `group`. Raises as `load`."""
        device = loaded.device
        is_cuda = device.type == "cuda"
        max_context = context_limit(settings, loaded.model.config)
        model = PackedModel(
            loaded.model,
            num_slots=settings.engine.max_batch_size + is_cuda,  # one for rows that pad
            max_context=max_context,
            device=device,
        )
        bind_experts(loaded.experts.values(), NoExperts())
        model.warm_up()
        if is_cuda:
            log_link(device)
            free = free_bytes(loaded, settings.engine.max_prefill_tokens)
        else:
            free = free_host_bytes(model.kv_bytes, group.size)
        with ExitStack() as undo:
            offloader = open_offloader(loaded, settings.offload, group, policy_parts, free)
            undo.callback(offloader.close)
            tap = RouterTap(loaded.model)
            undo.callback(tap.close)
            recorder = None
            if settings.offload.record_path is not None and group.rank == 0:
                recorder = StepRecorder(
                    settings.offload.record_path,
                    num_experts=loaded.num_experts,
                    max_bytes=settings.offload.record_bytes,
                )
            maps = LearnedMaps.open(
                settings.offload,
                offloader,
                fingerprint=loaded.fingerprint,
                is_saved=group.rank == 0,
            )
            experts: StepExperts
            gpu = None
            if is_cuda:
                gpu = assemble_gpu(loaded, model, offloader, tap, recorder, group, settings)
                experts = gpu.experts
            else:
                experts = OffloadedExperts(loaded, offloader, tap, recorder, group)
            undo.pop_all()
        bind_experts(loaded.experts.values(), experts)
        return cls(
            model=model,
            experts=experts,
            gpu=gpu,
            offloader=offloader,
            store=loaded.store,
            recorder=recorder,
            maps=maps,
            group=group,
            info=RunnerInfo(
                num_slots=settings.engine.max_batch_size,
                max_context=max_context,
                max_prefill_tokens=settings.engine.max_prefill_tokens,
                vocab_size=loaded.vocab_size,
                num_layers=loaded.num_layers,
                num_experts=loaded.num_experts,
                top_k=loaded.top_k,
                expert_bytes=loaded.layout.blob_bytes,
                expert_slots=offloader.num_slots,
                device=str(device),
                dtype=str(loaded.dtype).removeprefix("torch."),
                policy=settings.offload.policy,
            ),
            pooling=settings.offload.pooling,
            num_threads=settings.engine.num_threads,
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def learned_maps(self) -> LearnedMaps | None:
        return self._maps

    @property
    def model(self) -> Any:
        """The transformers model; not to be changed while a step runs."""
        return self._model.model

    @property
    def gate_rule(self) -> str:
        """How a gate's output becomes a distribution; a name of `models.router.RULES`."""
        return self._experts.gate_rule

    async def step(self, plan: StepPlan) -> StepResult:
        """A failed computation is in the result and ends its requests; later steps can go on.

        Raises EngineError where they cannot: other shards wait for what this one has not computed,
        or the GPU is in an error that stays until its process ends.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run, plan)

    async def close(self) -> None:
        """Ends a sum in progress with an error, then gives up slots and store."""
        self._group.close()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._release)
        finally:
            self._thread.shutdown()

    def shutdown(self) -> None:
        """`close` without an event loop."""
        self._group.close()
        try:
            self._thread.submit(self._release).result()
        finally:
            self._thread.shutdown()

    def counters(self) -> CacheCounters:
        """Of the expert cache, since it was made."""
        return self._offloader.counters()

    def replay_routing(self, ids_LTK: torch.Tensor | None) -> None:
        """From the next step on the gates choose these experts, int [L, >= T, K], whatever they
        think; None ends it. For measurements: raises EngineError where our own kernels do not
        compute the experts.
        """
        from fmoe_ray.engine.gpu.slot_experts import SlotExperts

        if not isinstance(self._experts, SlotExperts):
            raise EngineError("routing can be replayed on a GPU only, by our own kernels")
        self._experts.replay(ids_LTK)

    def check_integrity(self) -> None:
        """Raises RuntimeError where the books of the expert cache disagree. Between steps only."""
        self._offloader.check_integrity()

    def _release(self) -> None:
        """All of it, whatever fails; the last failure is raised."""
        with ExitStack() as closing:  # from the last line to the first
            if self._recorder is not None:
                closing.callback(self._recorder.close)
            if self._maps is not None:
                closing.callback(self._maps.close)
            closing.callback(self._store.close)
            closing.callback(self._offloader.close)
            closing.callback(self._experts.close)
            if self._gpu is not None:
                closing.callback(self._gpu.close)

    def run(self, plan: StepPlan) -> StepResult:
        """`step` on the calling thread: for use without an event loop, never beside it. Raises as
        `step`.
        """
        started = time.perf_counter()
        for request_id in plan.ended:
            self._forget(request_id)
        if not plan.rows:
            return StepResult(step=plan.step, rows=[], stats=_NO_STATS)
        for row in plan.rows:
            self._begin(row)
        try:
            with torch.inference_mode():
                logits_RV, iteration = self._compute(plan.rows)
        except (EngineError, RuntimeError) as error:  # a transfer, or torch
            self._offloader.abort_iteration()
            logger.exception("step %d failed", plan.step)
            message = f"step {plan.step} failed: {error}"
            if self._group.size > 1:
                raise EngineError(message) from error
            self._require_working_device(message)
            return StepResult(step=plan.step, rows=[], stats=_NO_STATS, error=message)
        self._decoding.update(row.request_id for row in plan.rows if row.samples)
        if self._group.rank == 0:
            rows = self._sample(plan.rows, logits_RV, iteration)
        else:
            rows = _without_tokens(plan.rows, iteration)
        return StepResult(
            step=plan.step,
            rows=rows,
            stats=_stats(iteration, time.perf_counter() - started, self._resident_now_and_then()),
            routing_checksum=iteration.routing_checksum,
        )

    def _require_working_device(self, message: str) -> None:
        """After a failed step. Raises EngineError with `message` if no later one can succeed."""
        if self._gpu is None:
            return
        try:
            torch.cuda.synchronize(self._info.device)
        except RuntimeError as fatal:
            raise EngineError(f"{message}; the device is lost: {fatal}") from fatal

    def _resident_now_and_then(self) -> bytes:
        now = time.monotonic()
        if now - self._told_resident_s < _TELL_RESIDENT_EVERY_S:
            return b""
        self._told_resident_s = now
        return np.packbits(self._offloader.resident()).tobytes()

    def _compute(self, rows: Sequence[Row]) -> tuple[torch.Tensor, IterationStats]:
        tokens_T = self._model.token_ids(rows)
        tokens_of_row_R = [len(row.tokens) for row in rows]
        phases_R = [self._phase(row) for row in rows]
        embeddings_TH = self._model.embed(tokens_T)
        embeddings_RH = pool_rows(embeddings_TH, tokens_of_row_R, self._pooling)
        self._offloader.begin_iteration(
            np.array([row.request_id for row in rows], np.int64),
            np.array(phases_R, np.uint8),
            np.array([_only_token(row) for row in rows], np.int32),
            embeddings_RH.cpu().numpy(),
        )
        logits_RV = self._forward(rows, tokens_T, tokens_of_row_R)
        iteration = self._offloader.end_iteration()
        if self._recorder is not None:
            self._recorder.end_step(rows, [phase == PREFILL for phase in phases_R], embeddings_TH)
        return logits_RV, iteration

    def _forward(
        self, rows: Sequence[Row], tokens_T: torch.Tensor, tokens_of_row_R: list[int]
    ) -> torch.Tensor:
        decode = None if self._gpu is None else self._gpu.decode
        if decode is not None and decode.takes(rows):
            return decode.forward(rows)
        self._experts.begin_step(tokens_of_row_R)
        if self._gpu is None:
            return self._model.forward(rows, tokens_T)
        with self._gpu.uncompiled():
            return self._model.forward(rows, tokens_T)

    def _phase(self, row: Row) -> int:
        return DECODE if row.request_id in self._decoding else PREFILL

    def _sample(
        self, rows: Sequence[Row], logits_RV: torch.Tensor, iteration: IterationStats
    ) -> list[RowResult]:
        # One look at the device for all: the greatest of a row is NaN if any of it is.
        top_R, token_R = logits_RV.max(-1)
        is_nan_R = top_R.isnan().tolist()
        greedy_R = token_R.tolist()
        results = []
        for number, row in enumerate(rows):
            experts = _counts(iteration, number)
            if is_nan_R[number]:
                error = f"request {row.request_id}: the model computed not-a-number (NaN) logits"
                results.append(
                    RowResult(request_id=row.request_id, token=None, experts=experts, error=error)
                )
            elif not row.samples:
                results.append(RowResult(request_id=row.request_id, token=None, experts=experts))
            else:
                drawn = self._samplers[row.request_id].draw(logits_RV[number], greedy_R[number])
                results.append(
                    RowResult(
                        request_id=row.request_id,
                        token=drawn.token,
                        experts=experts,
                        logprob=drawn.logprob,
                        top_logprobs=drawn.top_logprobs,
                    )
                )
        return results

    def _begin(self, row: Row) -> None:
        if row.request_id in self._requests:
            return
        self._requests.add(row.request_id)
        if self._group.rank == 0:
            self._samplers[row.request_id] = Sampler(row.sampling or Sampling())

    def _forget(self, request_id: int) -> None:
        if request_id in self._requests:
            self._requests.discard(request_id)
            self._samplers.pop(request_id, None)
            self._decoding.discard(request_id)
            self._offloader.end_request(request_id)


def _counts(iteration: IterationStats, row: int) -> ExpertCounts:
    hits, late, misses = (int(count) for count in iteration.rows[row])
    return ExpertCounts(hits=hits, late=late, misses=misses)


def _without_tokens(rows: Sequence[Row], iteration: IterationStats) -> list[RowResult]:
    return [
        RowResult(request_id=row.request_id, token=None, experts=_counts(iteration, number))
        for number, row in enumerate(rows)
    ]


def _only_token(row: Row) -> int:
    return row.tokens[0] if len(row.tokens) == 1 else -1


def _use_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)  # per thread: has to be said on the one that computes


def _stats(iteration: IterationStats, seconds: float, resident: bytes) -> StepStats:
    return StepStats(
        resident=resident,
        seconds=seconds,
        stall_seconds=iteration.stall_s,
        bytes_on_demand=iteration.bytes.on_demand,
        bytes_prefetched=iteration.bytes.prefetched,
        hits=iteration.hits,
        late=iteration.late,
        misses=iteration.misses,
        bytes_prefetch_used=iteration.bytes.prefetch_used,
        bytes_prefetch_wasted=iteration.bytes.prefetch_wasted,
        num_predictions=iteration.num_predictions,
        prediction_score=iteration.prediction_score,
        num_maps=iteration.num_maps,
    )
