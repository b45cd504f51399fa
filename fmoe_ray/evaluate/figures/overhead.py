"""Figure 15 (where the time of an iteration goes) and figure 16 (memory of the store)."""

import statistics
import time
from typing import TYPE_CHECKING

from fmoe_ray.config import Budget
from fmoe_ray.evaluate.dialogues import load_dialogues
from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.similarity import fill_store
from fmoe_ray.evaluate.figures.workload import iteration_maps
from fmoe_ray.evaluate.matcher_bench import store_memory
from fmoe_ray.evaluate.throttled_engine import ThrottledEngine, learned_policy
from fmoe_ray.maps import Matcher

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_MAPS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
LIMIT_MB = 200
MAX_OVERHEAD = 0.05
TIMED_DIALOGUES = 10
TIMED_ITERATIONS = 200
STORE_CAPACITY = 1000
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"


def figure_15(lab: Lab) -> FigureResult:
    compute_ms, collection_ms = _resident_steps(lab)
    matching_ms, update_ms = _prediction(lab)
    (fmoe,) = [result for result in lab.bench.policies if result.policy == "fmoe"]
    parts = [
        ("compute", SYNCHRONOUS, compute_ms),
        ("context collection", SYNCHRONOUS, collection_ms),
        ("on-demand loads", SYNCHRONOUS, fmoe.stall_ms),
        ("matching", ASYNCHRONOUS, matching_ms),
        (
            "prefetching",
            ASYNCHRONOUS,
            fmoe.prefetched_bytes / lab.bench.conditions.link_gbps * 1e-6,
        ),
        ("store update", ASYNCHRONOUS, update_ms),
    ]
    rows: list[Row] = [{"part": part, "kind": kind, "ms": ms} for part, kind, ms in parts]
    iteration_ms = compute_ms + collection_ms + fmoe.stall_ms
    share = collection_ms / iteration_ms

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        colours = {SYNCHRONOUS: "#d62728", ASYNCHRONOUS: "#1f77b4"}
        for part, kind, ms in parts:
            axes.barh(part, ms, color=colours[kind])
            axes.annotate(f" {ms:.2f} ms", (max(ms, 0.0), part), va="center")
        axes.set(xlabel="time per iteration (ms)", xlim=(0, 1.2 * max(ms for *_, ms in parts)))
        axes.invert_yaxis()
        for kind, colour in colours.items():
            axes.barh(parts[0][0], 0, color=colour, label=kind)
        axes.legend(loc="lower right")
        axes.grid(axis="x", alpha=0.3)

    return FigureResult(
        name="15",
        title="Latency of one decode iteration, part by part",
        source="The engine on this machine's CPU, embedded model, policy fmoe, a quarter of the "
        "experts, a link on which an expert loads in half a layer's time. Compute: a step under "
        "lru, every expert resident, in processor time of the thread that computes; context "
        "collection: what fmoe adds to it. Both are medians over alternating dialogues. "
        "Matching: both searches in 1000 maps, all layers; update: a map stored in a full store.",
        rows=rows,
        findings=[
            Finding(
                paper="Synchronous overhead below 30 ms and 5% of an iteration",
                ours=f"context collection {collection_ms:.2f} ms, {share:.1%} of an iteration of "
                f"{iteration_ms:.1f} ms; on-demand loads {fmoe.stall_ms:.1f} ms beside it",
                holds=collection_ms < 30 and share < MAX_OVERHEAD,
            )
        ],
        draw=draw,
        size_inches=(7.5, 3.8),
    )


def _resident_steps(lab: Lab) -> tuple[float, float]:
    """Processor ms of a step under lru with every expert resident; what fmoe adds to it."""
    dialogues = load_dialogues(lab.settings, seen=lab.seen, held_out=TIMED_DIALOGUES)
    learned = lab.embedded.trace.select(range(lab.seen))
    max_context = max(map(len, dialogues.held_out)) + lab.max_tokens
    info = None
    engines = {}
    seconds: dict[str, list[float]] = {"lru": [], "fmoe": []}
    try:
        for policy in seconds:
            offload = lab.settings.offload.model_copy(
                update={"policy": policy, "budget": Budget(fraction=1.0)}
            )
            own = lab.settings.model_copy(update={"offload": offload})
            engines[policy] = ThrottledEngine(
                own,
                max_context=max_context,
                eos=dialogues.eos,
                parts=None if info is None else learned_policy(own, info, learned),
            )
            info = engines[policy].info
        for prompt in dialogues.held_out:
            for policy, engine in engines.items():
                # Of this thread, which computes: a busy machine adds nothing, nor does the matcher.
                begin = time.thread_time()
                answer = engine.answer(prompt, lab.max_tokens)
                seconds[policy].append((time.thread_time() - begin) / len(answer.tokens))
    finally:
        for engine in engines.values():
            engine.close()
    added = [b - a for a, b in zip(seconds["lru"], seconds["fmoe"], strict=True)]
    return statistics.median(seconds["lru"]) * 1e3, statistics.median(added) * 1e3


def _prediction(lab: Lab) -> tuple[float, float]:
    """ms of an iteration's searches, and of storing its map in a full store."""
    workload = lab.embedded
    learned = iteration_maps(workload.trace, workload.learned, 10**9)
    store = fill_store(workload, learned, STORE_CAPACITY)
    assert learned.embeddings is not None
    matcher = Matcher(store)
    timed = range(min(TIMED_ITERATIONS, len(learned.probs)))
    begin = time.perf_counter()
    for number in timed:
        matcher.start(num_rows=1, embeddings=learned.embeddings[number : number + 1])
        matcher.best_semantic(0)
        for layer, probs in enumerate(learned.probs[number]):
            matcher.observe(layer, probs[None])
            matcher.best_trajectory(0)
    searched = time.perf_counter()
    part = slice(len(timed))
    store.insert(learned.probs[part], embeddings=learned.embeddings[part])
    stored = time.perf_counter()
    per_ms = 1e3 / len(timed)
    return (searched - begin) * per_ms, (stored - searched) * per_ms


def figure_16(lab: Lab) -> FigureResult:
    rows: list[Row] = [
        {
            "model": memory.model,
            "maps": memory.num_maps,
            "maps_MB": memory.map_bytes / 1e6,
            "embeddings_MB": memory.embedding_bytes / 1e6,
        }
        for num_maps in NUM_MAPS
        for memory in store_memory(num_maps)
    ]
    full = {str(row["model"]): float(row["maps_MB"]) for row in rows if row["maps"] == NUM_MAPS[-1]}
    beside = [f"{row['embeddings_MB']:.0f} MB" for row in rows if row["maps"] == NUM_MAPS[-1]]

    def draw(figure: "Figure") -> None:
        for axes, what, label in zip(
            figure.subplots(1, 2),
            ("maps_MB", "embeddings_MB"),
            ("maps alone (MB)", "embeddings (MB)"),
            strict=True,
        ):
            for model in full:
                values = [float(row[what]) for row in rows if row["model"] == model]
                axes.plot(NUM_MAPS, values, "o-", label=model)
            axes.set(
                xlabel="store capacity (maps)",
                ylabel=label,
                ylim=(0, 1.1 * max(LIMIT_MB, *(float(row[what]) for row in rows))),
            )
            axes.grid(alpha=0.3)
        figure.axes[0].axhline(LIMIT_MB, color="black", linestyle="--", label="200 MB")
        figure.axes[0].legend(fontsize=8)

    return FigureResult(
        name="16",
        title="Host memory of the store",
        source="Stores of the three models' shapes, half precision; embeddings at their hidden "
        "sizes, drawn apart.",
        rows=rows,
        findings=[
            Finding(
                paper="32K maps stay below 200 MB",
                ours=", ".join(f"{model} {megabytes:.0f} MB" for model, megabytes in full.items())
                + f" for the maps; embeddings {', '.join(beside)} beside",
                holds=max(full.values()) < LIMIT_MB,
            )
        ],
        draw=draw,
        size_inches=(9.0, 3.8),
    )
