"""What a simulation shows: waiting times, use of the GPUs over time, preemptions and work that was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker_proto import AttemptPlaced, Event, JobFinished, NodeJoined, StopReason, VerdictEvent
from stoker_scheduler.state import TAKES_WORK

from .workload import Work
from .world import Trial, Witness

WHOLE = 1000  # a GPU, in thousandths
BUCKET_MS = 3_600_000
MOST_POINTS = 400
Naming = Callable[[Work], str]


class Waits(NamedTuple):
    """Time from submission to the first start, in seconds, over some jobs that started."""

    jobs: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class Point(NamedTuple):
    """Shares of the GPUs that take work, over the stretch that ends here."""

    at_s: float
    allocated: float
    running: float
    fragmented: float


@dataclass(frozen=True)
class Result:
    """The figures of one simulation. Times are in seconds of the virtual clock, GPU time in GPU-seconds."""

    jobs: int
    finished: int
    never_started: int
    outcomes: dict[str, int]
    nodes: int
    gpus: float
    waits: Waits
    waits_by_class: dict[str, Waits]
    waits_by_queue: dict[str, Waits]
    waits_by_gpus: dict[str, Waits]
    mean_slowdown: float
    makespan_s: float
    allocation: float
    utilisation: float
    fragmentation: float
    preemptions: int
    preempted_jobs: int
    other_stops: dict[str, int]
    wasted_gpu_s: float
    over_time: tuple[Point, ...]


@dataclass(slots=True)
class _Story:
    work: Work
    started_ms: int | None = None
    ended_ms: int | None = None


@dataclass(slots=True)
class _Node:
    size: int = 0
    held: int = 0
    works: bool = False

    @property
    def there(self) -> int:
        """GPUs to share: all of a node that takes work, and of another one what is still in use."""
        return self.size if self.works else self.held

    @property
    def splintered(self) -> int:
        """Idle on a node that is partly in use: of no use to a gang that needs whole nodes."""
        return self.size - self.held if self.works and 0 < self.held < self.size else 0


@dataclass
class Ledger(Witness):
    """Adds up what the world tells."""

    start_ms: int
    _stories: dict[str, _Story] = field(default_factory=dict)
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _outcomes: Counter[str] = field(default_factory=Counter)
    _stops: Counter[str] = field(default_factory=Counter)
    _preempted: set[str] = field(default_factory=set)
    _now_ms: int = 0
    _level: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # milli: there, held, running, splintered
    _sums: list[list[int]] = field(default_factory=list)  # the same times milliseconds, by bucket
    _lost: int = 0
    _most: int = 0

    def __post_init__(self) -> None:
        self._now_ms = self.start_ms

    def submitted(self, at_ms: int, work: Work) -> None:
        self._stories[work.job_id] = _Story(work)

    def happened(self, at_ms: int, event: Event) -> None:
        if isinstance(event, NodeJoined | VerdictEvent):
            self._advance(at_ms)
            node = self._nodes.setdefault(event.node, _Node())
            self._count(node, -1)
            if isinstance(event, NodeJoined):
                # Booted: what was held there is not any more.
                self._level[1] -= node.held
                node.size, node.held, node.works = WHOLE * len(event.gpus), 0, False
            else:
                node.works = event.verdict in TAKES_WORK
            self._count(node, 1)
            self._most = max(self._most, self._level[0])

    def placed(self, at_ms: int, trial: Trial, placed: AttemptPlaced) -> None:
        self._advance(at_ms)
        self._level[1] += trial.milli
        for allocation in placed.allocations:
            self._hold(allocation.node, allocation.milli * len(allocation.gpus))

    def began(self, at_ms: int, trial: Trial) -> None:
        self._advance(at_ms)
        self._level[2] += trial.milli
        story = self._stories[trial.work.job_id]
        if story.started_ms is None:
            story.started_ms = at_ms

    def stopped(self, at_ms: int, trial: Trial, reason: StopReason) -> None:
        self._stops[reason] += 1
        if reason == "preempted":
            self._preempted.add(trial.work.job_id)

    def exited(self, at_ms: int, trial: Trial, lost_ms: int) -> None:
        self._advance(at_ms)
        self._level[2] -= trial.milli
        self._lost += lost_ms * trial.milli

    def freed(self, at_ms: int, trial: Trial, node: str) -> None:
        self._advance(at_ms)
        share = trial.milli // len(trial.nodes)
        self._level[1] -= share
        self._hold(node, -share)

    def finished(self, at_ms: int, work: Work, told: JobFinished) -> None:
        self._outcomes[told.outcome] += 1
        if told.state == "succeeded":
            self._stories[work.job_id].ended_ms = at_ms

    def result(self, at_ms: int) -> Result:
        """The figures up to this moment."""
        self._advance(at_ms)
        stories = list(self._stories.values())
        begun = [story for story in stories if story.started_ms is not None]
        done = [story for story in stories if story.ended_ms is not None]
        there, held, running, splintered = (
            (sum(column) for column in zip(*self._sums, strict=True)) if self._sums else (0,) * 4
        )
        last_ms = max([story.ended_ms or 0 for story in done], default=at_ms)
        slowdowns = [((s.ended_ms or 0) - s.work.at_ms) / max(1, s.work.duration_ms) for s in done]
        return Result(
            jobs=len(stories),
            finished=sum(self._outcomes.values()),
            never_started=len(stories) - len(begun),
            outcomes=dict(sorted(self._outcomes.items())),
            nodes=len(self._nodes),
            gpus=self._most / WHOLE,
            waits=_waits(begun),
            waits_by_class=_by(begun, lambda work: work.spec.compute.priority_class),
            waits_by_queue=_by(begun, lambda work: work.spec.compute.queue),
            waits_by_gpus=_by(begun, lambda work: f"{work.spec.compute.num_accelerators:6}"),
            mean_slowdown=_rounded(sum(slowdowns) / len(slowdowns)) if slowdowns else 0.0,
            makespan_s=(last_ms - self.start_ms) / 1000,
            allocation=_share(held, there),
            utilisation=_share(running - self._lost, there),
            fragmentation=_share(splintered, there),
            preemptions=self._stops["preempted"],
            preempted_jobs=len(self._preempted),
            other_stops={name: count for name, count in sorted(self._stops.items()) if name != "preempted"},
            wasted_gpu_s=_rounded(self._lost / (1000 * WHOLE)),
            over_time=self._points(at_ms),
        )

    def _hold(self, name: str, milli: int) -> None:
        node = self._nodes[name]
        self._count(node, -1)
        node.held += milli
        self._count(node, 1)

    def _count(self, node: _Node, sign: int) -> None:
        self._level[0] += sign * node.there
        self._level[3] += sign * node.splintered

    def _advance(self, at_ms: int) -> None:
        while self._now_ms < at_ms:
            bucket = (self._now_ms - self.start_ms) // BUCKET_MS
            until_ms = min(at_ms, self.start_ms + (bucket + 1) * BUCKET_MS)
            if len(self._sums) <= bucket:
                self._sums.append([0, 0, 0, 0])
            for at, milli in enumerate(self._level):
                self._sums[bucket][at] += milli * (until_ms - self._now_ms)
            self._now_ms = until_ms

    def _points(self, at_ms: int) -> tuple[Point, ...]:
        width = max(1, -(-len(self._sums) // MOST_POINTS))
        points = []
        for first in range(0, len(self._sums), width):
            there, *shares = (sum(column) for column in zip(*self._sums[first : first + width], strict=True))
            end_ms = min(at_ms - self.start_ms, (first + width) * BUCKET_MS)
            points.append(Point(end_ms / 1000, *(_share(part, there) for part in shares)))
        return tuple(points)


def _waits(stories: Iterable[_Story]) -> Waits:
    waits = sorted((s.started_ms - s.work.at_ms) / 1000 for s in stories if s.started_ms is not None)
    if not waits:
        return Waits(0, 0.0, 0.0, 0.0, 0.0)
    mean, p50, p99 = sum(waits) / len(waits), waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    return Waits(len(waits), _rounded(mean), p50, p99, waits[-1])


def _by(stories: Iterable[_Story], name: Naming) -> dict[str, Waits]:
    groups: dict[str, list[_Story]] = {}
    for story in stories:
        groups.setdefault(name(story.work), []).append(story)
    return {key.strip(): _waits(group) for key, group in sorted(groups.items())}


def _share(part: int, whole: int) -> float:
    return _rounded(part / whole, 4) if whole else 0.0


def _rounded(value: float, digits: int = 3) -> float:
    return round(value, digits)
