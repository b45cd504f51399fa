"""What transformers and accelerate reach on the same sizes, timed in the same run."""

import copy
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, StaticCache

from fmoe_ray.evaluate.engine_bench import EngineReport
from fmoe_ray.models.loader import LoadedModel

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 64
MARGIN_BYTES = 6 << 30


def beside(loaded: LoadedModel, reports: Sequence[EngineReport]) -> list[EngineReport]:
    """The reports with `peers` filled in: milliseconds a token by name, batch by batch.

    transformers with all weights on the GPU where they fit, eagerly and captured in a CUDA graph;
    accelerate's CPU offload with the same bytes of experts on the GPU.
    """
    if loaded.device.type != "cuda":
        return list(reports)
    need = loaded.store.num_blobs * loaded.store.blob_bytes
    if need + MARGIN_BYTES > torch.cuda.mem_get_info(loaded.device)[0]:
        logger.warning("transformers beside us needs %d bytes of GPU memory: left out", need)
        return list(reports)
    model = _whole_model(loaded)
    resident = {
        batch: {"transformers": _eager(model, batch), "transformers-graph": _captured(model, batch)}
        for batch in {report.batch for report in reports}
    }
    offloaded: dict[int, float] = {}
    filled = []
    for report in reports:
        peers = dict(resident[report.batch])
        if report.batch == 1:
            if not offloaded:
                offloaded[report.expert_slots] = _accelerate(loaded, model, report.expert_slots)
            if report.expert_slots in offloaded:
                peers["accelerate"] = offloaded[report.expert_slots]
        filled.append(msgspec.structs.replace(report, peers=peers))
    return filled


def _whole_model(loaded: LoadedModel) -> Any:
    """transformers' own model of the same configuration, weights random, on the device."""
    config = copy.deepcopy(loaded.model.config)  # a model goes on reading its own
    config._experts_implementation, config._attn_implementation = "grouped_mm", "sdpa"
    if config.model_type == "gpt_oss":
        config._attn_implementation = "eager"  # its attention sinks
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    model = model.to_empty(device=loaded.device).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.fill_(0.5)
    return model


def _timed(step: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


def _decoder(model: Any, batch: int) -> Callable[[], object]:
    tokens = torch.randint(0, 1000, (batch, PROMPT_TOKENS), device=model.device)
    with torch.no_grad():
        cache = model(tokens, use_cache=True).cache

    def step() -> object:
        with torch.no_grad():
            return model(tokens[:, :1], cache=cache, use_cache=True)

    return step


def _eager(model: Any, batch: int, times: int = 12) -> float:
    step = _decoder(model, batch)
    step()
    return _timed(step, times)


def _captured(model: Any, batch: int) -> float:
    model.set_experts_implementation("batched_mm")
    cache = StaticCache(config=model.config, max_cache_len=256)
    tokens = torch.randint(0, 1000, (batch, 1), device=model.device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(tokens, cache=cache, use_cache=True)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model(tokens, cache=cache, use_cache=True)
    milliseconds = _timed(graph.replay, 24)
    model.set_experts_implementation("grouped_mm")
    return milliseconds


def _accelerate(loaded: LoadedModel, model: Any, expert_slots: int, times: int = 3) -> float:
    """Consumes the model."""
    from accelerate import dispatch_model, infer_auto_device_map

    experts = loaded.store.num_blobs * loaded.store.blob_bytes
    dense = sum(p.numel() * p.itemsize for p in model.parameters()) - experts
    on_device = dense + expert_slots * loaded.store.blob_bytes
    model.cpu()
    torch.cuda.empty_cache()
    device_map = infer_auto_device_map(
        model,
        max_memory={loaded.device.index: on_device, "cpu": 1 << 40},
        no_split_module_classes=list(model._no_split_modules),
    )
    return _eager(dispatch_model(model, device_map), 1, times)
