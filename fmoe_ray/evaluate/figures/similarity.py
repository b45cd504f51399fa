"""Figure 8 (does a better match predict better) and figure 14a (do larger stores match better)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fmoe_ray.evaluate.figures.figure_result import FigureResult, Finding, Row
from fmoe_ray.evaluate.figures.lab import Lab
from fmoe_ray.evaluate.figures.workload import IterationMaps, Workload, iteration_maps
from fmoe_ray.maps import MapStore, Matcher

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTANCE = 3
MAX_LEARNED = 12_000
NUM_QUERIES = 400
CORRELATION_CAPACITY = 1000
CAPACITIES = (64, 128, 256, 512, 1000, 2000, 4000, 8000)
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """Of each query iteration: score of the best match and the part of chosen experts among the top
    K of what it says; a trajectory's are means over the layers it guides. NaN without embeddings.
    """

    semantic_score: Floats
    semantic_hits: Floats
    trajectory_score: Floats
    trajectory_hits: Floats
    is_prefill: npt.NDArray[np.bool_]


def fill_store(workload: Workload, learned: IterationMaps, capacity: int) -> MapStore:
    trace = workload.trace
    store = MapStore(
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        capacity=capacity,
        embedding_size=0 if learned.embeddings is None else learned.embeddings.shape[1],
        prefetch_distance=DISTANCE,
    )
    for start in range(0, len(learned.probs), 1000):
        part = slice(start, start + 1000)
        store.insert(
            learned.probs[part],
            embeddings=None if learned.embeddings is None else learned.embeddings[part],
            chosen=learned.chosen[part],
        )
    return store


def search(store: MapStore, queries: IterationMaps, top_k: int) -> Matches:
    """The paper's two searches for every query."""
    matcher = Matcher(store)
    cells = []
    for number, (probs, chosen) in enumerate(zip(queries.probs, queries.chosen, strict=True)):
        own = None if queries.embeddings is None else queries.embeddings[number : number + 1]
        matcher.start(num_rows=1, embeddings=own)
        semantic = (np.nan, np.nan)
        if own is not None:
            match = matcher.best_semantic(0)
            guided = store.entry(match.entry).probs[:DISTANCE]
            semantic = (match.score, _hits(guided, chosen[:DISTANCE], top_k))
        scores, hits = [], []
        for layer in range(len(probs) - DISTANCE):
            matcher.observe(layer, probs[layer : layer + 1])
            match = matcher.best_trajectory(0)
            target = slice(layer + DISTANCE, layer + DISTANCE + 1)
            scores.append(match.score)
            hits.append(_hits(store.entry(match.entry).probs[target], chosen[target], top_k))
        cells.append((*semantic, np.mean(scores), np.mean(hits)))
    columns = np.array(cells).T
    return Matches(
        semantic_score=columns[0],
        semantic_hits=columns[1],
        trajectory_score=columns[2],
        trajectory_hits=columns[3],
        is_prefill=queries.is_prefill,
    )


def _hits(probs: Floats, chosen: npt.NDArray[np.bool_], top_k: int) -> float:
    """Part of the chosen experts among the K most probable; of K, where a prompt chose more."""
    top = np.argsort(-probs, axis=-1, kind="stable")[:, :top_k]
    found = np.take_along_axis(chosen, top, axis=-1).sum()
    return float(found / np.minimum(chosen.sum(axis=-1), top_k).sum())


def figure_8(lab: Lab) -> FigureResult:
    clouds: dict[str, tuple[Floats, Floats]] = {}
    for workload in (lab.real, lab.embedded):
        learned = iteration_maps(workload.trace, workload.learned, MAX_LEARNED)
        queries = iteration_maps(workload.trace, workload.measured, NUM_QUERIES)
        store = fill_store(workload, learned, CORRELATION_CAPACITY)
        found = search(store, queries, workload.trace.top_k)
        decode = ~found.is_prefill
        clouds[f"trajectory, {workload.name}"] = (
            found.trajectory_score[decode],
            found.trajectory_hits[decode],
        )
        if queries.embeddings is not None:
            clouds[f"semantic, {workload.name}"] = (
                found.semantic_score[decode],
                found.semantic_hits[decode],
            )
    rows: list[Row] = []
    findings = []
    for name, (scores, hits) in clouds.items():
        pearson = _pearson(scores, hits)
        rows.append(
            {
                "search": name,
                "iterations": len(scores),
                "pearson": "" if pearson is None else pearson,
                "mean_score": float(scores.mean()),
                "mean_hits": float(hits.mean()),
            }
        )
        findings.append(
            Finding(
                paper="Score and hit rate correlate positively, strongly (Pearson)",
                ours=f"{name}: every score is the same"
                if pearson is None
                else f"{name}: {pearson:.2f} over {len(scores)} iterations",
                holds=None if pearson is None else pearson >= 0.5,
            )
        )

    def draw(figure: "Figure") -> None:
        for axes, (name, (scores, hits)) in zip(
            figure.subplots(1, len(clouds)), clouds.items(), strict=True
        ):
            axes.plot(scores, hits, "o", markersize=3, alpha=0.4)
            pearson = _pearson(scores, hits)
            title = name.replace(", ", "\n", 1)
            axes.set_title(title + ("" if pearson is None else f"\nr = {pearson:.2f}"), fontsize=9)
            axes.set(xlabel="similarity score", ylabel="hit rate of the match", ylim=(-0.03, 1.03))
            axes.grid(alpha=0.3)

    return FigureResult(
        name="8",
        title="Similarity score and hit rate",
        source=f"The best of {CORRELATION_CAPACITY} stored maps for each of {NUM_QUERIES} unseen "
        f"iterations. Semantic: its layers 1..{DISTANCE}; trajectory: layer l + {DISTANCE} after "
        "gate l, means over an iteration. Semantic search needs embeddings: embedded model alone. "
        "A decode iteration has one token, which the store has mostly seen: many scores are 1. "
        "Prompts are left out: they choose nearly every expert, so that every match hits.",
        rows=rows,
        findings=findings,
        draw=draw,
        size_inches=(10.5, 3.8),
    )


def _pearson(a: Floats, b: Floats) -> float | None:
    if np.ptp(a) < 1e-6 or np.ptp(b) < 1e-6:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def figure_14a(lab: Lab) -> FigureResult:
    rows: list[Row] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    for workload in (lab.real, lab.embedded):
        learned = iteration_maps(workload.trace, workload.learned, MAX_LEARNED)
        queries = iteration_maps(workload.trace, workload.measured, NUM_QUERIES // 2)
        for capacity in CAPACITIES:
            if capacity > len(learned.probs):
                break
            lab.on_progress(f"figure 14a: {capacity} maps, {workload.name}")
            store = fill_store(workload, learned, capacity)
            found = search(store, queries, workload.trace.top_k)
            scores = {"trajectory": found.trajectory_score.mean()}
            if queries.embeddings is not None:
                scores["semantic"] = found.semantic_score.mean()
            for kind, score in scores.items():
                curves.setdefault(f"{kind}, {workload.name}", []).append((capacity, float(score)))
                rows.append(
                    {
                        "workload": workload.name,
                        "search": kind,
                        "capacity": capacity,
                        "learned_iterations": len(learned.probs),
                        "mean_score": float(score),
                        "trajectory_hits": float(found.trajectory_hits.mean()),
                    }
                )

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        shown = sorted({capacity for points in curves.values() for capacity, _ in points})
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [str(capacity) for capacity in shown])
        axes.set(xlabel="store capacity (maps)", ylabel="mean similarity of the best match")
        axes.grid(alpha=0.3)
        axes.legend()

    return FigureResult(
        name="14a",
        title="Similarity of the best match against the store's capacity",
        source="Stores filled with the learned iterations in order (RDY replaces), searched for "
        f"{NUM_QUERIES // 2} unseen iterations. Capacities beyond what was learned are left out.",
        rows=rows,
        findings=[_flattening(name, points) for name, points in curves.items()],
        draw=draw,
    )


def _flattening(name: str, points: list[tuple[int, float]]) -> Finding:
    small = [score for capacity, score in points if capacity <= 1000]
    large = [score for capacity, score in points if capacity >= 1000]
    before = small[-1] - small[0]
    if len(large) < 2:
        ours = f"{name}: +{before:.3f} up to {points[-1][0]} maps; not enough learned to go on"
        return Finding(paper="Gains flatten past 1K maps", ours=ours, holds=None)
    after = large[-1] - large[0]
    return Finding(
        paper="Gains flatten past 1K maps",
        ours=f"{name}: +{before:.3f} from {points[0][0]} to 1000 maps, {after:+.3f} from there to "
        f"{points[-1][0]}",
        holds=after < before,
    )
