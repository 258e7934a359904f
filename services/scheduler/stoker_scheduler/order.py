"""Who is next: inside a queue by class, boost, priority and order of submission; between queues by fair share.

Between siblings, one that stays within its nominal goes before one that borrows, then the one with the lowest weighted
dominant share including what it asks for, then the one whose first job came first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from .quota import ROOT, Tree, own_held, own_nominal, share
from .state import Job, State
from .usage import ALL, Usage
from .waiting import Key, Lane

MS_IN_HOUR = 3_600_000
Rank = tuple[bool, int, int]


class Candidate(NamedTuple):
    """The job to look at next, and where it stands."""

    job: Job
    queue: str
    lane: Lane


@dataclass
class _Lane:
    lane: Lane
    keys: list[Key]
    at: int = 0


@dataclass
class Walk:
    """Goes through all waiting jobs in order, in one pass; lanes and queues that are blocked are left out whole."""

    state: State
    tree: Tree
    usage: Usage
    totals: dict[str, int]
    now_ms: int
    _heaps: dict[str, list[tuple[int, Key, int]]] = field(default_factory=dict)
    _lanes: list[_Lane] = field(default_factory=list)
    _best: dict[str, tuple[Rank, Candidate] | None] = field(default_factory=dict)
    unknown: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.half_life_ms = int(self.state.cluster.scheduling.half_life_hours * MS_IN_HOUR)
        for queue, lanes in self.state.waiting.queues.items():
            heap = []
            for lane, keys in lanes.items():
                priority = self.tree.classes.get(lane.priority_class)
                if priority is None or queue not in self.tree.queues:
                    self.unknown += [Candidate(self.state.jobs[key[3]], queue, lane) for key in keys]
                    continue
                heap.append((-priority.value, keys[0], len(self._lanes)))
                self._lanes.append(_Lane(lane, keys))
            heapq.heapify(heap)
            self._heaps[queue] = heap

    def next(self) -> Candidate | None:
        """The first of all; it stays the first until it is told what became of it."""
        best = self._pick(ROOT)
        return best[1] if best else None

    def placed(self, candidate: Candidate) -> None:
        """It was placed, and the usage says so: the next of its lane follows."""
        self._advance(candidate)

    def skip(self, candidate: Candidate) -> None:
        """It cannot start for reasons of its own."""
        self._advance(candidate)

    def drop_lane(self, candidate: Candidate) -> None:
        """No job of its lane can start in this pass."""
        heapq.heappop(self._heaps[candidate.queue])
        self._forget(candidate.queue)

    def drop_queue(self, queue: str) -> list[tuple[Lane, str]]:
        """No job of the queue may start in this pass; the lanes that had a first job left, with that job."""
        left = [(self._lanes[at].lane, key[3]) for _, key, at in sorted(self._heaps[queue])]
        self._heaps[queue] = []
        self._forget(queue)
        return left

    def behind(self, candidate: Candidate, most: int) -> list[Key]:
        """The first keys of the candidate's lane that come after it."""
        _, _, at = self._heaps[candidate.queue][0]
        lane = self._lanes[at]
        return list(lane.keys[lane.at + 1 : lane.at + 1 + most])

    def _advance(self, candidate: Candidate) -> None:
        heap = self._heaps[candidate.queue]
        value, _, at = heap[0]
        lane = self._lanes[at]
        lane.at += 1
        if lane.at < len(lane.keys):
            heapq.heapreplace(heap, (value, lane.keys[lane.at], at))
        else:
            heapq.heappop(heap)
        self._forget(candidate.queue)

    def _forget(self, queue: str) -> None:
        for name in self.usage.path(queue):
            self._best.pop(name, None)
        self._best.pop(ROOT, None)

    def _pick(self, name: str) -> tuple[Rank, Candidate] | None:
        if name in self._best:
            return self._best[name]
        best: tuple[Rank, Candidate] | None = None
        for child in self.tree.children.get(name, ()):
            inner = self._best[child] if child in self._best else self._pick(child)
            if inner is not None and (best is None or inner[0] < best[0]):
                best = inner
        heap = self._heaps.get(name)
        if heap:
            _, key, at = heap[0]
            candidate = Candidate(self.state.jobs[key[3]], name, self._lanes[at].lane)
            own = self._own_rank(name, candidate.job)
            if best is None or own < best[0]:
                best = (own, candidate)
        if best is not None and name != ROOT:
            best = (self._rank(name, best[1].job), best[1])
        self._best[name] = best
        return best

    def _rank(self, name: str, job: Job) -> Rank:
        extra = asked_of(job)
        borrows = False
        for model, bound in self.tree.bounds[name].items():
            if bound.nominal is not None and extra.get(model):
                borrows = borrows or self.usage.of(name, model) + extra[model] > bound.nominal
        told = share(self.tree, self.usage, self.totals, name, extra, self.now_ms, self.half_life_ms)
        return borrows, told, job.seq

    def _own_rank(self, name: str, job: Job) -> Rank:
        """Jobs right in this queue stand beside the queues below it like one more of them, with what these leave."""
        if name not in self.tree.children:
            return False, 0, job.seq
        borrows = False
        for model, milli in asked_of(job).items():
            nominal = own_nominal(self.tree, name, model)
            if nominal is not None:
                borrows = borrows or own_held(self.tree, self.usage, name, model) + milli > nominal
        held = own_held(self.tree, self.usage, name) + job.milli
        return borrows, held * 1_000_000 // max(1, self.totals.get(ALL, 0)), job.seq


def asked_of(job: Job) -> dict[str, int]:
    """GPU share asked for by model, as far as it is known before a place is found; under ALL in every case."""
    models = job.demand.models
    return {ALL: job.milli, models[0]: job.milli} if len(models) == 1 else {ALL: job.milli}
