"""The plain orders that a scheduler must beat: first come first served, EASY backfill, and skipping what is blocked.

Nodes of equal size, no preemption, true durations known. A gang takes whole nodes first; what is left of it goes to
the node that it fills best.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import Literal, NamedTuple

Order = Literal["fifo", "easy", "easy_deep", "skip"]
# Jobs behind the first blocked one that EASY looks at; easy_deep looks at all. The published 388.7 minutes on 144 nodes
# do not say how deep they looked: 400 comes within 3 % of them, and all of them is a harder baseline (327.8).
DEPTH = 400
Held = tuple[tuple[int, int], ...]


class Ask(NamedTuple):
    """A job: when it comes, how many GPUs it takes, and for how long."""

    at: int
    gpus: int
    lasts: int


class Nodes:
    """How many GPUs are free on each node, and nodes by how many."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.free = [size] * count
        self._by_free: list[set[int]] = [set() for _ in range(size + 1)]
        self._by_free[size] = set(range(count))

    def fits(self, gpus: int) -> bool:
        whole, rest = divmod(gpus, self.size)
        idle = len(self._by_free[self.size])
        if idle < whole:
            return False
        return not rest or idle > whole or any(self._by_free[n] for n in range(rest, self.size))

    def take(self, gpus: int) -> Held:
        whole, rest = divmod(gpus, self.size)
        held = [(node, self.size) for node in heapq.nsmallest(whole, self._by_free[self.size])]
        for node, share in held:
            self._move(node, -share)
        if rest:
            left = next(n for n in range(rest, self.size + 1) if self._by_free[n])
            node = min(self._by_free[left])
            self._move(node, -rest)
            held.append((node, rest))
        return tuple(held)

    def give(self, held: Held) -> None:
        for node, share in held:
            self._move(node, share)

    def _move(self, node: int, change: int) -> None:
        self._by_free[self.free[node]].remove(node)
        self.free[node] += change
        self._by_free[self.free[node]].add(node)


def waits(asks: Sequence[Ask], nodes: int, size: int, order: Order) -> list[int]:
    """How long each job waits, under this order."""
    space = Nodes(nodes, size)
    started = [-1] * len(asks)
    running: list[tuple[int, int, Held]] = []  # by end
    waiting: list[int] = []
    coming = sorted(range(len(asks)), key=lambda job: asks[job].at)
    came = 0
    while came < len(coming) or running:
        now = min(asks[coming[came]].at if came < len(coming) else running[0][0], running[0][0] if running else 1 << 60)
        while running and running[0][0] <= now:
            space.give(running.pop(0)[2])
        while came < len(coming) and asks[coming[came]].at <= now:
            waiting.append(coming[came])
            came += 1
        for job in _starters(asks, waiting, running, space, now, order):
            started[job] = now
        waiting = [job for job in waiting if started[job] < 0]
    return [begin - ask.at for begin, ask in zip(started, asks, strict=True)]


def _starters(
    asks: Sequence[Ask], waiting: list[int], running: list[tuple[int, int, Held]], space: Nodes, now: int, order: Order
) -> list[int]:
    """Start jobs in order; behind the first blocked one only those that the order lets pass."""
    begun: list[int] = []
    until: int | None = None  # what passes must be gone by then
    blocked: set[int] = set()  # sizes that did not fit
    looked = 0
    for job in waiting:
        ask = asks[job]
        if until is not None:
            looked += 1
            if looked > DEPTH and order == "easy":
                break
            if now + ask.lasts > until:
                continue
        if ask.gpus in blocked:
            continue
        if not space.fits(ask.gpus):
            blocked.add(ask.gpus)
            if order == "fifo":
                break
            if order != "skip" and until is None:
                until = _when(ask.gpus, running, space)
            continue
        insort(running, (now + ask.lasts, job, space.take(ask.gpus)))
        begun.append(job)
        if not any(space.free):
            break
    return begun


def _when(gpus: int, running: list[tuple[int, int, Held]], space: Nodes) -> int:
    """When the gang would fit if nothing else started."""
    given: list[Held] = []
    for _, _, held in running:
        space.give(held)
        given.append(held)
        if space.fits(gpus):
            break
    for held in given:
        for node, share in held:
            space._move(node, -share)
    return running[len(given) - 1][0]
