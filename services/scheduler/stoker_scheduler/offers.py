"""What one more node share costs on each node, in jobs that give way: roughly everywhere, exactly where it is cheapest.

A lower bound is known for every node at once. Only the node with the lowest is looked at closely, and again only those
nodes that hold a part of a job that was chosen to go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from stoker_proto import PreemptRule

from .state import Attempt, Job


class Victim(NamedTuple):
    """A job that could be preempted, and what that would cost: lost thousandths of GPUs times milliseconds.

    `held` is how many GPUs it holds by row; `key` is the order in which jobs go, and begins with the tier.
    """

    job: Job
    attempt: Attempt
    rule: PreemptRule
    over: int
    lost: int
    held: dict[int, int]
    tier: tuple[int, int]
    key: tuple[int, int, int, int, int, str]


class Cost(NamedTuple):
    """Smaller is better."""

    jobs: int
    over: int
    lost: int
    ids: tuple[str, ...]


class Offer(NamedTuple):
    """One share of the gang on a node: who must go for it beside those who go already, and the GPUs it gets."""

    cost: Cost
    row: int
    more: list[Victim]
    gpus: tuple[int, ...]


def cost_of(victims: tuple[Victim, ...] | list[Victim]) -> Cost:
    over, lost = sum(v.over for v in victims), sum(v.lost for v in victims)
    return Cost(len(victims), -over, lost, tuple(sorted(v.job.id for v in victims)))


Fewest = Callable[[int, list[Victim], list[Victim]], int | None]
Exact = Callable[[int, int, list[Victim], list[Victim]], Offer | None]


class Offers:
    """For one gang. `fewest(row, others, picked)` says how many of the others must go at least, None when all are too
    few; `exact(row, size, others, picked)` finds the cheapest so many."""

    def __init__(self, rows: Iterable[int], victims: dict[int, list[Victim]], fewest: Fewest, exact: Exact) -> None:
        self._victims = victims
        self._fewest = fewest
        self._exact = exact
        self._stamps = dict.fromkeys(rows, 0)
        # A bound comes before what is exact at the same cost: it may turn out to be the better one by its ids or row.
        self._heap: list[tuple[int, int, int, bool, tuple[str, ...], int, int]] = []
        self._found: dict[int, Offer] = {}
        for row in self._stamps:
            self._look(row, [])
        heapq.heapify(self._heap)

    def cheapest(self, picked: list[Victim]) -> Offer | None:
        """The best one for the next share, given who goes already."""
        heap = self._heap
        while heap:
            size, _, _, exact, _, row, stamp = heap[0]
            if self._stamps.get(row) != stamp:
                heapq.heappop(heap)
            elif exact:
                heapq.heappop(heap)
                return self._found[row]
            else:
                others = self._others(row, picked)
                offer = self._exact(row, size, others, picked)
                if offer is not None:
                    self._found[row] = offer
                    heapq.heapreplace(heap, (*offer.cost[:3], True, offer.cost.ids, row, stamp))
                elif size < len(others):
                    heapq.heapreplace(heap, self._bound(row, size + 1, others))
                else:
                    heapq.heappop(heap)
        return None

    def take(self, offer: Offer, picked: list[Victim]) -> None:
        """The gang has this share; `picked` are all who go now."""
        del self._stamps[offer.row]
        touched = {row for victim in offer.more for row in victim.held} & self._stamps.keys()
        for row in sorted(touched):
            self._stamps[row] += 1
            self._look(row, picked)
        if touched:
            heapq.heapify(self._heap)

    def _others(self, row: int, picked: list[Victim]) -> list[Victim]:
        victims = self._victims.get(row, [])
        if not picked or not victims:
            return victims
        names = {v.job.id for v in picked}
        return [v for v in victims if v.job.id not in names]

    def _look(self, row: int, picked: list[Victim]) -> None:
        others = self._others(row, picked)
        least = self._fewest(row, others, picked)
        if least is not None:
            self._heap.append(self._bound(row, least, others))

    def _bound(
        self, row: int, size: int, others: list[Victim]
    ) -> tuple[int, int, int, bool, tuple[str, ...], int, int]:
        """No choice of so many on the node costs less."""
        over = sum(sorted([v.over for v in others], reverse=True)[:size])
        lost = sum(sorted([v.lost for v in others])[:size])
        return size, -over, lost, False, (), row, self._stamps[row]
