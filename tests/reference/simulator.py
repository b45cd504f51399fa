"""The link model one tick after the other, and rules that a policy may follow.

Experts are indices e = l * J + j; a gate is the experts that it needs, ascending.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fmoe_ray.trace.format import RoutingTrace

Gate = tuple[int, ...]
NEVER = 10**9


def gates_of(trace: RoutingTrace, batch: int = 1) -> list[Gate]:
    """In order; a row that ends takes the next sequence."""
    waiting = [list(range(start, start + length)) for start, length in trace.sequences()]
    rows: list[list[int]] = []
    gates: list[Gate] = []
    while True:
        rows = [row for row in rows if row]
        ended = batch - len(rows)
        rows += waiting[:ended]
        waiting = waiting[ended:]
        if not rows:
            return gates
        tokens = [row.pop(0) for row in rows]
        for layer in range(trace.num_layers):
            chosen = np.unique(trace.expert_ids[tokens, layer])
            gates.append(tuple(layer * trace.num_experts + int(j) for j in chosen))


class Rule(Protocol):
    def victim(self, now: "PlainSimulator", candidates: Collection[int]) -> int: ...

    def prefetch(self, now: "PlainSimulator", pinned: set[int]) -> tuple[int, int | None] | None:
        """(expert, victim or None for a free slot), or nothing."""


@dataclass
class PlainSimulator:
    """`compute` ticks a layer, `load` ticks an expert. Counts like the native simulator."""

    gates: Sequence[Gate]
    num_layers: int
    slots: int
    load: int
    compute: int
    rule: Rule
    ready: set[int] = field(default_factory=set)
    used_at: dict[int, int] = field(default_factory=dict)
    """The number of its last use by a gate."""
    uses: int = 0
    in_flight: tuple[int, int] | None = None
    """A prefetch and the ticks that it still takes."""
    position: int = -1
    """The gate that was asked last."""
    stall: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    prefetches: int = 0

    @property
    def time(self) -> float:
        """In layers."""
        return len(self.gates) + self.stall / self.compute

    @property
    def is_full(self) -> bool:
        return len(self.ready) + (self.in_flight is not None) == self.slots

    def next_use(self, expert: int) -> int:
        ahead = range(self.position + 1, len(self.gates))
        return next((gate for gate in ahead if expert in self.gates[gate]), NEVER)

    def offer_link(self, pinned: set[int]) -> None:
        choice = None if self.in_flight else self.rule.prefetch(self, pinned)
        if choice is None:
            return
        expert, victim = choice
        if victim is not None:
            self.ready.remove(victim)
        self.in_flight = (expert, self.load)
        self.prefetches += 1

    def advance_prefetch(self) -> None:
        if self.in_flight is None:
            return
        expert, left = self.in_flight
        self.in_flight = (expert, left - 1)
        if left == 1:
            self.in_flight = None
            self.ready.add(expert)

    def ask(self, needed: Gate) -> None:
        """Waits for what is late, then loads what is missing, one after the other."""
        late, missing = [], []
        for expert in needed:
            if expert in self.ready:
                self.hits += 1
            elif self.in_flight is not None and self.in_flight[0] == expert:
                late.append(expert)
                self.stall += self.in_flight[1]
                self.in_flight = None
            else:
                missing.append(expert)
                self.stall += self.load
            self.uses += 1
            self.used_at[expert] = self.uses
        self.late += len(late)
        self.misses += len(missing)
        self.ready.update(late)
        for expert in missing:
            candidates = self.ready - set(needed)
            if self.is_full and candidates:
                self.ready.remove(self.rule.victim(self, candidates))
            elif self.is_full:
                self.in_flight = None  # the gate needs its slot
            self.ready.add(expert)

    def run(self) -> "PlainSimulator":
        for position, needed in enumerate(self.gates):
            self.position = position
            self.ask(needed)
            self.offer_link(set(needed))
            for _ in range(self.compute):
                self.advance_prefetch()
                self.offer_link(set(needed))
            if (position + 1) % self.num_layers == 0:  # between iterations nothing is in use
                self.offer_link(set())
        return self


class Lru:
    def victim(self, now: PlainSimulator, candidates: Collection[int]) -> int:
        return min(candidates, key=lambda expert: now.used_at[expert])

    def prefetch(self, now: PlainSimulator, pinned: set[int]) -> None:
        return None


class Belady:
    def victim(self, now: PlainSimulator, candidates: Collection[int]) -> int:
        return min(candidates, key=lambda expert: (-now.next_use(expert), expert))

    def prefetch(self, now: PlainSimulator, pinned: set[int]) -> tuple[int, int | None] | None:
        return None


class PerfectPrefetch(Belady):
    """What the nearest gate within an iteration needs, unless its victim is needed sooner."""

    def prefetch(self, now: PlainSimulator, pinned: set[int]) -> tuple[int, int | None] | None:
        end = min(now.position + 1 + now.num_layers, len(now.gates))
        for gate in range(now.position + 1, end):
            for expert in now.gates[gate]:
                if expert in now.ready:
                    continue
                if not now.is_full:
                    return expert, None
                candidates = now.ready - pinned
                victim = self.victim(now, candidates) if candidates else None
                if victim is None or now.next_use(victim) <= gate:
                    return None
                return expert, victim
        return None


@dataclass
class Script:
    """After each gate its own list of prefetches, over and over; the lowest expert goes first."""

    wanted: Sequence[Sequence[int]]

    def victim(self, now: PlainSimulator, candidates: Collection[int]) -> int:
        return min(candidates)

    def prefetch(self, now: PlainSimulator, pinned: set[int]) -> tuple[int, int | None] | None:
        absent = [expert for expert in self.wanted[now.position] if expert not in now.ready]
        if not absent:
            return None
        if not now.is_full:
            return absent[0], None
        candidates = now.ready - pinned
        return (absent[0], min(candidates)) if candidates else None
