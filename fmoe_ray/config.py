"""Every setting, validated and frozen. One YAML file serves `serve run` and the command line.

Unknown keys are refused. Knows neither torch nor Ray.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from fmoe_ray.errors import ConfigError

_RECORD_BYTES = 2 * 2**30
_BYTES = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(text: str) -> int:
    """`"4GiB"` -> 4294967296. Raises ConfigError for anything that is not a number and a unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].lower() not in _BYTES:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(float(match[1]) * _BYTES[match[2].lower()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How many experts one device may hold. One of the three is set; none is automatic."""

    fraction: float | None = None
    num_bytes: int | None = None
    num_experts: int | None = None

    @classmethod
    def parse(cls, value: object) -> "Budget":
        """0.25 or "25%": of all experts; "4GiB": bytes; 64: experts; "auto": what is left over.

        Raises ConfigError naming the value.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(
                f"budget {value!r}: write 0.25, 25%, 4GiB, a number of experts or auto"
            )
        text = str(value).strip()
        if text.lower() == "auto":
            return cls()
        if re.fullmatch(r"\d+", text):
            budget = cls(num_experts=int(text))
        elif re.fullmatch(r"\d*\.\d+|\d+\.\d*|\d+e-?\d+", text):
            budget = cls(fraction=float(text))
        elif text.endswith("%") and re.fullmatch(r"\d+(\.\d+)?", text[:-1]):
            budget = cls(fraction=float(text[:-1]) / 100)
        elif re.fullmatch(r"\d+(\.\d+)?\s*[A-Za-z]+", text):
            budget = cls(num_bytes=parse_bytes(text))
        else:
            raise ConfigError(
                f"budget {value!r}: write 0.25, 25%, 4GiB, a number of experts or auto"
            )
        if budget.fraction is not None and not 0 < budget.fraction <= 1:
            raise ConfigError(f"budget {value!r}: a fraction lies above 0 and at most at 1")
        if budget.num_bytes == 0 or budget.num_experts == 0:
            raise ConfigError(f"budget {value!r}: at least top_k experts are needed")
        return budget

    @property
    def is_automatic(self) -> bool:
        return self.fraction is None and self.num_bytes is None and self.num_experts is None

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction:g}"
        if self.num_bytes is not None:
            return f"{self.num_bytes}B"
        return "auto" if self.num_experts is None else str(self.num_experts)

    def slots(self, *, num_experts: int, expert_bytes: int, min_slots: int) -> int:
        """Expert slots on a device that hosts `num_experts` experts of `expert_bytes` bytes each.

        A budget above all experts is cut to them. Automatic means all of them here; who knows the
        device's free memory resolves it to bytes first. Raises ConfigError below `min_slots`.
        """
        if self.fraction is not None:
            slots = int(self.fraction * num_experts + 1e-9)
        elif self.num_bytes is not None:
            slots = self.num_bytes // expert_bytes
        else:
            slots = num_experts if self.num_experts is None else self.num_experts
        if slots < min_slots:
            raise ConfigError(
                f"expert budget {self} holds {slots} experts; a token needs {min_slots} at once: "
                f"give at least {min_slots}, or {min_slots * expert_bytes} bytes"
            )
        return min(slots, num_experts)


def _budget(value: object) -> Budget:
    try:
        return Budget.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


BudgetField = Annotated[Budget, BeforeValidator(_budget)]


def _size(value: object) -> object:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return value


SizeField = Annotated[int, BeforeValidator(_size), Field(gt=0)]

Text = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,  # a log is no place for a key
    )


class ModelSettings(_Section):
    path: Text = "tiny"
    """A checkpoint folder, a hub name, or `tiny`: the demonstration model inside the package."""
    served_name: Text | None = None
    """The name in `/v1/models` and in requests; the last part of `path` if not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` keeps the checkpoint's on a GPU and computes in float32 on a CPU."""

    @property
    def name(self) -> str:
        name = self.served_name or Path(self.path).name
        return name if name not in ("", "..") else Path(self.path).resolve().name or self.path


class OffloadSettings(_Section):
    policy: str = "fmoe+"
    """Which policy decides on prefetching and eviction; `fmoe bench policies` compares them."""
    budget: BudgetField = Budget()
    """Experts held per device: 0.25 or 25% of all, 4GiB, 64 experts, or auto: all of them if the
    device's memory allows, otherwise what it leaves after everything else."""
    eviction: Literal["policy", "lru", "lfu", "ema", "fmoe"] = "policy"
    """Overrides the policy's own choice of victims."""
    prefetch_distance: Annotated[int, Field(ge=1)] = 3
    """d: how many layers ahead of its use an expert is prefetched. `fmoe+` weighs all distances at
    once: there it is that of the stored maps only (a file is read with its own distance)."""
    store_capacity: Annotated[int, Field(ge=1)] = 1000
    """C: expert maps kept by the store."""
    store_path: Text | None = None
    """Where learned maps are saved and loaded from; none keeps them in memory only. Where maps are
    shared the store's actor reads and writes it, on the head node while that lives."""
    share_maps: bool = True
    """In a cluster the replicas of one model learn from each other, through a store actor. Without
    it each replica learns alone, and adds what it has learnt to `store_path` when it leaves."""
    pooling: Literal["mean", "last", "max"] = "mean"
    """How a prompt's token embeddings become one semantic embedding."""
    chunk_bytes: Annotated[SizeField, Field(ge=4096)] = 4 * 2**20
    """Copies are cut into chunks of this size, at least 4 KiB; an on-demand load overtakes between
    two of them."""
    prefetch_depth: Annotated[int, Field(ge=1)] = 2
    """Prefetches handed to the link at once."""
    link_gbps: Annotated[float, Field(gt=0)] | None = None
    """CPU device only: throttles copies to this rate (GB/s), to study a slower link."""
    record_path: Text | None = None
    """Writes a routing trace of what was served to this file, when the shards leave. In a cluster
    each replica has a file of its own: its identity stands before the suffix."""
    record_bytes: SizeField = _RECORD_BYTES
    """Recording ends for good, with a warning, at this size: until it is written the trace lies in
    the host's memory, and takes as much again while it is."""
    transfer_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A step that waits longer for an expert fails with an error instead of hanging."""

    @model_validator(mode="after")
    def _limits_a_record_that_is_made(self) -> Self:
        if self.record_path is None and self.record_bytes != _RECORD_BYTES:
            raise ValueError("record_bytes has no effect without record_path; give both or neither")
        return self


class EngineSettings(_Section):
    max_batch_size: Annotated[int, Field(ge=1)] = 16
    """Requests computed together, and so KV slots."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and answer together; the model's own limit if not given."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Prompt tokens in one step at most: bounds the workspace. A longer prompt is cut up."""
    max_waiting: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait for a KV slot; one more is refused with 429."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A request that takes longer ends with an error."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """A replica whose step gives no result for this long is replaced."""
    cuda_graphs: bool = True
    """GPU only: decode steps run as one CUDA graph each; off, the same kernels one by one."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads for the dense computation; torch's own choice if not given."""


class ShardSettings(_Section):
    num_shards: Annotated[int, Field(ge=1)] = 1
    """G: devices that share the experts; expert e = l*J + j lies on shard e mod G."""
    placement: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"
    """STRICT_PACK keeps all shards of a replica on one node."""
    wait_for_nodes: bool = False
    """True where the cluster adds GPU nodes by itself. Otherwise an application that no node can
    hold fails at once instead of waiting for one."""
    meeting_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long started shards wait for each other before they load."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Examining the node may take this long, and after that placing the shards, their loading and
    meeting together, before the replica fails with a message."""


class ServerSettings(_Section):
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), repr=False)
    """Accepted bearer tokens; none means that no key is asked for. No message repeats them."""
    keep_alive_s: Annotated[float, Field(gt=0)] = 10.0
    """A stream without tokens for this long sends a comment, so that proxies keep it open."""
    stream_interval_ms: Annotated[float, Field(ge=0)] = 10.0
    """Tokens that come within this time of the chunk before are sent in one chunk: each chunk costs
    the proxy far more than a token. The first token is never held back, nor one that comes later
    than that; 0 sends every token alone."""
    save_timeout_s: Annotated[float, Field(gt=0)] = 15.0
    """A replica that is shut down waits this long for its shards to write maps and traces and to
    leave shared memory. Before that Serve has let its requests finish; the deployment's
    graceful_shutdown_timeout_s bounds both together."""


class RoutingSettings(_Section):
    by_experts: bool = False
    """Sends a request to the replica whose resident experts fit its prompt best, where that is
    known: for handle calls from the body, over HTTP from the header `x-fmoe-prompt`, the prompt or
    its beginning, percent-encoded. Else to the less busy of two. Needs a policy that keeps maps."""
    max_lead: Annotated[int, Field(ge=0)] = 4
    """Requests by which the fitting replica may be busier than the least busy one."""


class Settings(_Section):
    model: ModelSettings = ModelSettings()
    offload: OffloadSettings = OffloadSettings()
    engine: EngineSettings = EngineSettings()
    shards: ShardSettings = ShardSettings()
    server: ServerSettings = ServerSettings()
    routing: RoutingSettings = RoutingSettings()


def describe(error: ValidationError) -> str:
    """One line a mistake: the key, what is wrong, the value unless a secret may be in it."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown setting; remove it or correct its spelling")
        else:
            is_plain = isinstance(item["input"], str | int | float | None)
            shows = is_plain and "api_keys" not in item["loc"]
            lines.append(f"{key}: {item['msg']}" + f", got {item['input']!r}" * shows)
    return "; ".join(lines)


def parse_settings(args: dict[str, Any]) -> Settings:
    """Raises ConfigError naming every wrong key and value."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Raises ConfigError naming the file if it cannot be read or is not YAML."""
    try:
        return parse_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_yaml(text: str | bytes) -> Any:
    """Bytes are UTF-8. Raises ConfigError for anything but YAML."""
    try:
        return yaml.safe_load(text if isinstance(text, str) else text.decode("utf-8"))
    # A value that does not fit its tag, such as 2001-99-99, raises whatever Python's own type does.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"not YAML: {error}") from error


def load_settings(path: str | os.PathLike[str]) -> Settings:
    """Reads `applications[0].args` of a Serve configuration file.

    Raises ConfigError if the file is missing, is not YAML, or holds wrong settings.
    """
    document = read_yaml(path)
    applications = document.get("applications") if isinstance(document, dict) else None
    if (
        not isinstance(applications, list)
        or not applications
        or not isinstance(applications[0], dict)
    ):
        raise ConfigError(f"{path}: no applications: list; is it a Serve configuration file?")
    args = applications[0].get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(
            f"{path}: applications[0].args must be a mapping, not {type(args).__name__}"
        )
    try:
        return parse_settings(args)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
