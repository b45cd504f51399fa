"""Where the figures' numbers come from: the trace given, and traces and runs of the embedded model,
recorded once and kept in a folder.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from fmoe_ray import __version__
from fmoe_ray.config import Budget, EngineSettings, OffloadSettings, Settings
from fmoe_ray.errors import ConfigError
from fmoe_ray.evaluate.dialogues import load_dialogues, record_routing
from fmoe_ray.evaluate.figures.arrivals import Arrivals, load_arrivals, prompts_of_length
from fmoe_ray.evaluate.figures.workload import Workload
from fmoe_ray.evaluate.policy_bench import Conditions, PolicyBench, PolicyResult, bench_policies
from fmoe_ray.policy import list_policies
from fmoe_ray.trace.format import RoutingTrace, load_trace, save_trace

SPLIT = 0.7


class Lab:
    """Everything is made when first asked for; a second run in the same folder finds it there."""

    def __init__(
        self,
        cache: Path,
        trace: Path,
        *,
        seen: int = 300,
        held_out: int = 60,
        max_tokens: int = 24,
        bench_dialogues: int = 12,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        """`cache` exists. `seen` and `held_out` count dialogues of the embedded model."""
        self._cache = cache
        self._trace = trace
        self.seen = seen
        self.held_out = held_out
        self.max_tokens = max_tokens
        self._bench_dialogues = bench_dialogues
        self.on_progress = on_progress
        self.settings = Settings(
            offload=OffloadSettings(budget=Budget(fraction=0.25)),
            engine=EngineSettings(num_threads=1),
        )

    @cached_property
    def real(self) -> Workload:
        """The trace given: the first 70% of its sequences are learned from."""
        trace = load_trace(self._trace)
        learned, measured = trace.split(SPLIT)
        name = "GPT-OSS routing" if "gpt-oss" in self._trace.name else self._trace.stem
        return Workload(name=name, trace=trace, learned=learned, measured=measured)

    @cached_property
    def embedded(self) -> Workload:
        """Dialogues answered by the embedded model: full distributions, prompts, embeddings."""
        trace = self._recorded(
            self._key("embedded", self.seen, self.held_out, self.max_tokens), self._record
        )
        sequences = trace.sequences()
        return Workload(
            name="embedded model",
            trace=trace,
            learned=sequences[: self.seen],
            measured=sequences[self.seen :],
        )

    def online(self, kind: str) -> tuple[Arrivals, Workload]:
        """Azure's requests of a kind, "conv" or "code", answered by the embedded model."""
        arrivals = load_arrivals(kind)
        trace = self._recorded(self._key("online", kind), lambda: self._record_online(arrivals))
        workload = Workload(
            name="embedded model", trace=trace, learned=(), measured=trace.sequences()
        )
        return arrivals, workload

    @property
    def bench_path(self) -> Path:
        """Where `bench` is kept."""
        names = [info.name for info in list_policies()]
        key = self._key("engine", self.seen, self._bench_dialogues, self.max_tokens, *names)
        return self._cache / f"{key}.json"

    @cached_property
    def bench(self) -> PolicyBench:
        """The engine itself on a throttled CPU."""
        path = self.bench_path
        if path.exists():
            return _read_bench(path)
        embedded = self.embedded.trace
        self.on_progress("running the engine")
        report = bench_policies(
            self.settings,
            seen=self.seen,
            held_out=self._bench_dialogues,
            max_tokens=self.max_tokens,
            seen_trace=embedded.select(range(self.seen)),
        )
        path.write_text(json.dumps(asdict(report)), encoding="utf-8")
        return report

    def _key(self, what: str, *asked: object) -> str:
        """Of a file that holds what these arguments gave with these settings and this version."""
        body = json.dumps([__version__, repr(self.settings), *map(str, asked)])
        return f"{what}-{hashlib.sha256(body.encode()).hexdigest()[:12]}"

    def _recorded(self, name: str, record: Callable[[], RoutingTrace]) -> RoutingTrace:
        path = self._cache / f"{name}.npz"
        if not path.exists():
            self.on_progress(f"recording {name}")
            save_trace(path, record())
        return load_trace(path)

    def _record(self) -> RoutingTrace:
        dialogues = load_dialogues(self.settings, seen=self.seen, held_out=self.held_out)
        prompts = dialogues.seen + dialogues.held_out
        return record_routing(self.settings, prompts, max_tokens=self.max_tokens, eos=dialogues.eos)

    def _record_online(self, arrivals: Arrivals) -> RoutingTrace:
        dialogues = load_dialogues(self.settings, seen=400, held_out=0)
        prompts = prompts_of_length(dialogues.seen, arrivals.prompt_tokens)
        return record_routing(self.settings, prompts, max_tokens=arrivals.answer_tokens)


def _read_bench(path: Path) -> PolicyBench:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return PolicyBench(
            conditions=Conditions(**body["conditions"]),
            policies=[PolicyResult(**row) for row in body["policies"]],
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: damaged ({error!r}); delete it, to measure again") from error
