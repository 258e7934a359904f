"""Waiting jobs, by queue and then by lane: jobs of one lane are alike in all that decides whether they fit.

A pass looks at the first job of a lane; when that one finds no place, no other of its lane would. So a pass costs as
much as there are lanes, not jobs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from .placement import Demand

Key = tuple[bool, int, int, str]


class Lane(NamedTuple):
    """What jobs of one lane have in common. `avoid` are exclusions (node, sequence, end), `window` its own window."""

    priority_class: str
    demand: Demand
    within: str | None = None
    window: str | None = None
    array_id: str | None = None
    avoid: tuple[tuple[str, int, int], ...] = ()


class Place(NamedTuple):
    """Where a job stands: its queue, lane, and key inside the lane (boosted, priority, order of submission)."""

    queue: str
    lane: Lane
    key: Key


class Waiting:
    """An index of waiting jobs that is kept as jobs come and go."""

    def __init__(self) -> None:
        self.queues: dict[str, dict[Lane, list[Key]]] = {}
        self._places: dict[str, Place] = {}

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def place(self, job_id: str) -> Place:
        return self._places[job_id]

    def add(self, job_id: str, place: Place) -> None:
        self._places[job_id] = place
        lanes = self.queues.setdefault(place.queue, {})
        keys = lanes.get(place.lane)
        if keys is None:
            keys = lanes[place.lane] = []
        insort(keys, place.key)

    def remove(self, job_id: str) -> None:
        place = self._places.pop(job_id, None)
        if place is None:
            return
        lanes = self.queues[place.queue]
        keys = lanes[place.lane]
        del keys[bisect_left(keys, place.key)]
        if not keys:
            del lanes[place.lane]
            if not lanes:
                del self.queues[place.queue]

    def listing(self) -> list[object]:
        """All of it, in an order that only the content decides."""
        return [*sorted((job_id, at.queue, repr(at.lane), at.key) for job_id, at in self._places.items())]
