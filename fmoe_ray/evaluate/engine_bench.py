"""How fast the engine serves a model whose experts do not all fit, beside what the hardware allows.

Two limits: serial, the step with everything resident plus the bytes that had to come over the
measured link rate; overlapped, the larger of the two.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from fmoe_ray.config import Settings
from fmoe_ray.engine.gpu.link import best_time, copy_rate
from fmoe_ray.engine.messages import Row, Sampling, StepPlan, StepResult
from fmoe_ray.engine.step_runner import StepRunner
from fmoe_ray.errors import EngineError
from fmoe_ray.evaluate.replay import Routing, open_routing
from fmoe_ray.evaluate.throttled_engine import learned_policy
from fmoe_ray.models.loader import LoadedModel

GREEDY = Sampling(temperature=0.0)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is run."""

    budget: str
    policy: str = "lru"
    routing: str = "model"
    batch: int = 1
    prompt_tokens: int = 512
    warm_steps: int = 24
    steps: int = 48
    seed: int = 0
    cuda_graphs: bool = True


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one decode step, in the mean."""

    on_demand: float
    prefetched: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds; a step decodes one token of each row."""

    model: str
    device: str
    budget: str
    policy: str
    routing: str
    batch: int
    expert_slots: int
    ttft_ms: float
    ttft_limit_ms: float
    ttft_over_limit: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    tpot_ms_mean: float
    tokens_per_s: float
    hit_rate: float
    stall_ms: float
    bytes: Bytes
    link_gbps: float
    memory_gbps: float
    resident_step_ms: float
    roofline_ms: float
    resident_over_roofline: float
    serial_limit_ms: float
    overlapped_limit_ms: float
    tpot_over_serial: float
    tpot_over_overlapped: float
    peers: dict[str, float] = {}


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    link_gbps: float
    memory_gbps: float


def measure_ceilings(device: torch.device) -> Ceilings:
    """Rates of large copies: host to device, and within the device (bytes read plus written)."""
    size, times = 1 << 28, 8
    link = copy_rate(device, num_bytes=size, times=times)
    there, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * size / best_time(lambda: other.copy_(there), device, times)
    return Ceilings(link_gbps=link / 1e9, memory_gbps=memory / 1e9)


class _Drive:
    """Rows of one runner: prompts first, then all rows step by step."""

    def __init__(self, runner: StepRunner, load: Load, routing: Routing | None) -> None:
        self._runner = runner
        self._load = load
        self._routing = routing
        self._position = 0
        self._prompts = self._choose_prompts()
        self._tokens = [0] * load.batch

    def _choose_prompts(self) -> list[list[int]]:
        rows, positions = range(self._load.batch), range(self._load.prompt_tokens)
        if self._routing is not None and self._routing.token is not None:
            return [[self._routing.token(row, at) for at in positions] for row in rows]
        random = np.random.default_rng(self._load.seed)
        prompts: list[list[int]] = random.integers(
            self._runner.info.vocab_size, size=(len(rows), len(positions))
        ).tolist()
        return prompts

    def prefill(self, request_offset: int = 0) -> list[tuple[float, StepResult]]:
        """One prompt after the other."""
        results = []
        for row, prompt in enumerate(self._prompts):
            self._replay([row] * len(prompt), list(range(len(prompt))))
            results.append(self._step([(row, 0, prompt)], request_offset))
            self._tokens[row] = results[-1][1].rows[0].token or 0
        self._position = self._load.prompt_tokens
        return results

    def decode(self, request_offset: int = 0) -> tuple[float, StepResult]:
        self._replay(list(range(self._load.batch)), [self._position] * self._load.batch)
        if self._routing is not None and self._routing.token is not None:
            token = self._routing.token
            self._tokens = [token(row, self._position) for row in range(self._load.batch)]
        rows = [(row, self._position, [token]) for row, token in enumerate(self._tokens)]
        seconds, result = self._step(rows, request_offset)
        self._tokens = [row.token or 0 for row in result.rows]
        self._position += 1
        return seconds, result

    def end(self, request_offset: int) -> None:
        ended = [request_offset + row for row in range(self._load.batch)]
        self._runner.run(StepPlan(step=0, rows=[], ended=ended))

    def _step(
        self, rows: Sequence[tuple[int, int, list[int]]], offset: int
    ) -> tuple[float, StepResult]:
        plan = StepPlan(
            step=0,
            rows=[
                Row(
                    request_id=offset + row,
                    slot=row,
                    start=start,
                    tokens=tokens,
                    samples=True,
                    sampling=GREEDY,
                )
                for row, start, tokens in rows
            ],
        )
        started = time.perf_counter()
        result = self._runner.run(plan)
        seconds = time.perf_counter() - started
        if result.error is not None:
            raise EngineError(result.error)
        return seconds, result

    def _replay(self, rows: list[int], positions: list[int]) -> None:
        if self._routing is None:
            return
        experts = self._routing.experts
        ids_TLK = np.stack([experts(r, p) for r, p in zip(rows, positions, strict=True)])
        self._runner.replay_routing(torch.from_numpy(ids_TLK.swapaxes(0, 1).astype(np.int32)))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Of one runner and load; seconds."""

    ttft: float
    prefill_bytes: float
    steps: list[float]
    results: list[StepResult]
    expert_slots: int


def settings_for(load: Load, device: torch.device, max_batch: int) -> Settings:
    return Settings.model_validate(
        {
            "model": {"device": device.type},
            "offload": {"policy": load.policy, "budget": load.budget},
            "engine": {
                "max_batch_size": max_batch,
                "max_context": load.prompt_tokens + load.warm_steps + load.steps + 2,
                "max_prefill_tokens": max(load.prompt_tokens, 1),
                "cuda_graphs": load.cuda_graphs,
            },
        }
    )


def measure(runner: StepRunner, load: Load, routing: Routing | None) -> Measured:
    """A prompt of every row to warm up, again for TTFT, then the steps."""
    drive = _Drive(runner, load, routing)
    drive.prefill(1000)
    drive.decode(1000)
    drive.end(1000)
    first, result = drive.prefill()[0]
    for _ in range(load.warm_steps):
        drive.decode()
    timed = [drive.decode() for _ in range(load.steps)]
    drive.end(0)
    return Measured(
        ttft=first,
        prefill_bytes=result.stats.bytes_on_demand + result.stats.bytes_prefetched,
        steps=[seconds for seconds, _ in timed],
        results=[result for _, result in timed],
        expert_slots=runner.info.expert_slots,
    )


def run(
    loaded: LoadedModel, name: str, loads: Sequence[Load], ceilings: Ceilings
) -> Iterator[EngineReport]:
    """Every load on a runner of its own, beside one with all experts resident per batch and
    routing; each report as soon as it is measured. Leaves the model's store open. Raises
    CapacityError, EngineError.
    """
    resident: dict[tuple[int, str, int], Measured] = {}
    for load in loads:
        key = load.batch, load.routing, load.prompt_tokens
        if key not in resident:
            everything = msgspec.structs.replace(load, budget="1.0", policy="lru")
            resident[key] = _measure_alone(loaded, everything)
        measured = _measure_alone(loaded, load)
        yield _report(loaded, name, load, measured, resident[key], ceilings)


def _measure_alone(loaded: LoadedModel, load: Load) -> Measured:
    settings = settings_for(load, loaded.device, load.batch)
    routing = open_routing(load.routing, loaded, load.seed)
    parts = None
    if routing is not None and routing.seen is not None:
        parts = learned_policy(settings, loaded, routing.seen)
    runner = StepRunner.of(
        replace(loaded, store=loaded.store.share()), settings, policy_parts=parts
    )
    try:
        return measure(runner, load, routing)
    finally:
        runner.shutdown()


def _report(
    loaded: LoadedModel,
    name: str,
    load: Load,
    measured: Measured,
    resident: Measured,
    ceilings: Ceilings,
) -> EngineReport:
    stats = [result.stats for result in measured.results]
    asked = sum(s.hits + s.late + s.misses for s in stats)
    on_demand = statistics.fmean(s.bytes_on_demand for s in stats)
    prefetched = statistics.fmean(s.bytes_prefetched for s in stats)
    link = ceilings.link_gbps * 1e9
    step = statistics.median(resident.steps)
    transfer = (on_demand + prefetched) / link
    mean = statistics.fmean(measured.steps)
    serial, overlapped = step + on_demand / link, max(step, transfer)
    ttft_limit = max(measured.prefill_bytes / link, resident.ttft)
    experts = asked / len(stats)
    roofline = _step_bytes(loaded, load.batch, experts) / (ceilings.memory_gbps * 1e9)
    return EngineReport(
        model=name,
        device=str(loaded.device),
        budget=load.budget,
        policy=load.policy,
        routing=load.routing,
        batch=load.batch,
        expert_slots=measured.expert_slots,
        ttft_ms=measured.ttft * 1e3,
        ttft_limit_ms=ttft_limit * 1e3,
        ttft_over_limit=measured.ttft / ttft_limit,
        tpot_ms_p50=statistics.median(measured.steps) * 1e3,
        tpot_ms_p99=float(np.quantile(measured.steps, 0.99)) * 1e3,
        tpot_ms_mean=mean * 1e3,
        tokens_per_s=load.batch / mean,
        hit_rate=sum(s.hits for s in stats) / max(1, asked),
        stall_ms=statistics.fmean(s.stall_seconds for s in stats) * 1e3,
        bytes=Bytes(on_demand=on_demand, prefetched=prefetched),
        link_gbps=ceilings.link_gbps,
        memory_gbps=ceilings.memory_gbps,
        resident_step_ms=step * 1e3,
        roofline_ms=roofline * 1e3,
        resident_over_roofline=step / roofline,
        serial_limit_ms=serial * 1e3,
        overlapped_limit_ms=overlapped * 1e3,
        tpot_over_serial=mean / serial,
        tpot_over_overlapped=mean / overlapped,
    )


def _step_bytes(loaded: LoadedModel, batch: int, experts: float) -> float:
    """Read by one decode step: dense weights once, the experts it needs; KV is small beside."""
    model: Any = loaded.model
    embedding = model.get_input_embeddings().weight
    dense = sum(p.numel() * p.itemsize for p in model.parameters() if not p.is_meta)
    if model.get_output_embeddings().weight.data_ptr() != embedding.data_ptr():
        dense -= embedding.numel() * embedding.itemsize
    return float(dense + experts * loaded.layout.blob_bytes)
