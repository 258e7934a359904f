"""The cluster as folded from the log: jobs, attempts, claims, nodes and the one ledger of who holds which GPU.

Entities are frozen and replaced whole (named tuples, because dataclasses are replaced several times slower); the
containers of `State` belong to `evolve`, which consumes the state it is given and returns it changed. Every event is
folded by order alone: no clock but the log's own, no I/O, no randomness.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic_core import to_json

from stoker_proto import (
    Allocation,
    AttemptExited,
    Cluster,
    Event,
    Gpu,
    JobFailureAttributed,
    JobSpec,
    JobState,
    Outcome,
    PreemptRule,
    Reason,
    StopReason,
)

from .placement import Capacity, Demand
from .popular import Popular
from .usage import Usage
from .waiting import Waiting

Entity = TypeVar("Entity", bound=tuple[Any, ...])
TAKES_WORK = ("ready", "suspect")
STRIKES = 3  # different jobs that could not start on a node, until it counts as suspect


def changed(entity: Entity, **fields: object) -> Entity:
    """The entity with other fields: `_replace`, in a third of the time, for folds of half a million events."""
    kind = type(entity)
    places = PLACES.get(kind)
    if places is None:
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        places = PLACES[kind] = {name: at for at, name in enumerate(names)}
    values = list(entity)
    for name, value in fields.items():
        values[places[name]] = value
    return tuple.__new__(kind, values)


PLACES: dict[type, dict[str, int]] = {}


class Node(NamedTuple):
    """A node's inventory at its present boot epoch, and its health as health says it is.

    `strikes` names the jobs that could not be started there since something last went well.
    """

    name: str
    boot_epoch: str
    gpus: tuple[Gpu, ...]
    cpu_milli: int = 0
    memory_mib: int = 0
    labels: dict[str, str] = {}  # noqa: RUF012  (never changed: entities are replaced whole)
    verdict: str = "validating"
    verdict_seq: int = 0
    since_ms: int = 0
    reason: str = ""
    strikes: tuple[str, ...] = ()

    @property
    def takes_work(self) -> bool:
        return self.verdict in TAKES_WORK

    @property
    def suspect(self) -> bool:
        return self.verdict == "suspect" or len(self.strikes) >= STRIKES


class Part(NamedTuple):
    """One node's share of an attempt, from placed to released. `charge` is its GPU share by model, in thousandths."""

    allocation: Allocation
    charge: tuple[tuple[str, int], ...] = ()
    started_ms: int | None = None
    exited: AttemptExited | None = None
    released_ms: int | None = None
    sealed: bool = False
    lost: bool = False

    @property
    def milli(self) -> int:
        return self.allocation.milli * len(self.allocation.gpus)


class Attempt(NamedTuple):
    """One try: its parts, and what is known of its end. `fence` is the sequence of the decision that placed it.

    `saved_ms` is when its last durable checkpoint was told; `by` and `rule` say who preempted it and why.
    """

    number: int
    fence: int
    placed_ms: int
    parts: tuple[Part, ...]
    preflight: Literal["fresh", "required"]
    stop: StopReason | None = None
    stop_ms: int = 0
    grace_ms: int = 0
    by: str | None = None
    rule: PreemptRule | None = None
    preflight_failed: tuple[str, ...] | None = None
    attribution: JobFailureAttributed | None = None
    saved_ms: int | None = None

    @property
    def released(self) -> bool:
        return all(part.released_ms is not None for part in self.parts)

    @property
    def failed(self) -> AttemptExited | None:
        """The first part that failed without having been asked to stop."""
        exits = [p.exited for p in self.parts if p.exited and p.exited.asked is None and p.exited.outcome != "ok"]
        return exits[0] if exits else None

    @property
    def silent(self) -> tuple[str, ...]:
        """Nodes that did not start when others did; when none of several did, nobody knows which one it was."""
        found = tuple(p.allocation.node for p in self.parts if p.started_ms is None)
        return found if len(found) < len(self.parts) or len(found) == 1 else ()

    @property
    def running_ms(self) -> int | None:
        """When the last node of the gang started."""
        starts = [p.started_ms for p in self.parts]
        return max(s for s in starts if s is not None) if starts and None not in starts else None

    @property
    def milli(self) -> int:
        """GPU share still held, in thousandths."""
        return sum(p.milli for p in self.parts if p.released_ms is None)


class Exclusion(NamedTuple):
    """A node that the job avoids, until the node has passed a test again or the time has come."""

    node: str
    seq: int
    until_ms: int


class Job(NamedTuple):
    """A job and its present attempt. `seq` is its place in the queue, kept for ever.

    `since_ms` is when it last began to wait, `waits_for` which jobs must be over first. `retried` counts charged
    retries by outcome; `blamed` which nodes it failed on, by outcome, without established evidence against them.
    """

    id: str
    seq: int
    spec: JobSpec
    code: str | None
    submitted_ms: int
    since_ms: int
    priority: int
    demand: Demand
    array_id: str | None = None
    array_index: int | None = None
    state: JobState = "queued"
    cancel: bool = False
    held: bool = False
    waits_for: tuple[str, ...] = ()
    refused: str = ""
    boosted: bool = False
    attempt: Attempt | None = None
    attempts: int = 0
    retried: tuple[tuple[str, int], ...] = ()
    blamed: tuple[tuple[str, str], ...] = ()
    preemptions: int = 0
    gpu_ms: int = 0
    exclusions: tuple[Exclusion, ...] = ()
    not_before_ms: int = 0
    reasons: tuple[Reason, ...] = ()

    @property
    def queue(self) -> str:
        return self.spec.compute.queue

    @property
    def class_name(self) -> str:
        return self.spec.compute.priority_class

    @property
    def milli(self) -> int:
        """GPU share that the whole gang asks for, in thousandths."""
        return self.demand.gpus * self.demand.milli * self.demand.nodes

    @property
    def gated(self) -> bool:
        """Whether it may not start whatever is free."""
        return self.held or bool(self.waits_for) or bool(self.refused) or self.cancel


class Claim(NamedTuple):
    """GPUs kept for a waiting gang.

    With `until_ms` they are the ones that it had: it lost a node, and for so long it finds the others where they were.
    """

    job_id: str
    seq: int
    kind: Literal["preempt", "reserve"]
    allocations: tuple[Allocation, ...]
    starts_ms: int | None
    until_ms: int | None = None


class Over(NamedTuple):
    """What is kept of a job that is over: how it ended."""

    state: JobState
    outcome: Outcome


@dataclass(slots=True)
class State:
    """Everything the scheduler knows at sequence `seq`."""

    seq: int = 0
    at_ms: int = 0
    decision_seq: int = 0
    led_seq: int = 0  # since when the present leader leads: what was decided before is void, and its timers begin here
    led_ms: int = 0
    cluster: Cluster = field(default_factory=Cluster)
    version: int = 0
    windows: dict[str, bool] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    over: dict[str, Over] = field(default_factory=dict)
    active: dict[str, None] = field(default_factory=dict)
    gated: dict[str, None] = field(default_factory=dict)
    ending: dict[str, None] = field(default_factory=dict)
    untold: dict[str, None] = field(default_factory=dict)
    running: dict[tuple[str, str], int] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)
    dependents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)
    deadlines: dict[str, int] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    claimed: dict[tuple[str, str], str] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    at: dict[str, dict[str, int]] = field(default_factory=dict)
    owner: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    capacity: Capacity = field(default_factory=Capacity)
    usage: Usage = field(default_factory=Usage)
    popular: Popular = field(default_factory=Popular)
    tested: dict[tuple[str, ...], int] = field(default_factory=dict)
    preempted_ms: tuple[int, ...] = ()
    to_announce: dict[str, Event] = field(default_factory=dict)
    voided: int = 0
    ignored: int = 0
    touched: dict[str, None] = field(default_factory=dict)  # jobs that changed, the latest last
    touches: int = 0  # how often a job changed: who remembers it finds what changed since
    layout: int = 0  # rises when nodes or the configuration change: what is derived from them is made anew

    def held(self, node: str, uuid: str) -> int:
        """How much of a GPU is held, in thousandths."""
        return sum(self.owner[node].get(uuid, {}).values())

    def holders(self, node: str) -> set[str]:
        """Jobs that hold something on the node."""
        return {job_id for held in self.owner.get(node, {}).values() for job_id in held}

    def put(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.touches += 1
        self.touched.pop(job.id, None)
        self.touched[job.id] = None

    def drop(self, job_id: str) -> None:
        del self.jobs[job_id]
        self.touched.pop(job_id, None)

    def change(self, job_id: str, **fields: object) -> Job:
        job = changed(self.jobs[job_id], **fields)
        self.put(job)
        return job

    def touched_since(self, touches: int) -> list[str]:
        """Jobs that changed since there were so many touches, and perhaps some before them."""
        return list(islice(reversed(self.touched), self.touches - touches))


def state_hash(state: State) -> str:
    """The same log gives the same hash, in every process."""
    parts = [
        (state.seq, state.decision_seq, state.led_seq, state.led_ms, state.version, state.voided, state.ignored),
        state.cluster,
        list(state.windows.items()),
        list(state.jobs.values()),
        list(state.over.items()),
        [*state.active, "|", *state.gated, "|", *state.ending, "|", *state.untold],
        sorted((*key, count) for key, count in state.running.items()),
        state.waiting.listing(),
        sorted(state.arrays.items()),
        list(state.deadlines.items()),
        list(state.claims.values()),
        list(state.nodes.values()),
        [
            (node, uuid, sorted(held.items()))
            for node, gpus in sorted(state.owner.items())
            for uuid, held in sorted(gpus.items())
        ],
        state.usage.listing(),
        state.popular.listing(),
        sorted((list(k), v) for k, v in state.tested.items()),
        state.preempted_ms,
        list(state.to_announce),
    ]
    return hashlib.sha256(to_json(parts)).hexdigest()
