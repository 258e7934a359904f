"""The cluster as folded from the log: jobs, attempts, nodes and the one ledger of who holds which GPU.

Entities are frozen and replaced whole (named tuples, because dataclasses are replaced several times slower); the
containers of `State` belong to `evolve`, which consumes the state it is given and returns it changed. Every event is
folded by order alone: no clock but the log's own, no I/O, no randomness.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic_core import to_json

from stoker_proto import (
    Allocation,
    AttemptExited,
    Event,
    Gpu,
    JobFailureAttributed,
    JobSpec,
    JobState,
    Outcome,
    Problem,
    Reason,
    StopReason,
)

TAKES_WORK = ("ready", "suspect")
CLASS_VALUE = {"BEST_EFFORT": 0, "NORMAL": 1, "CRITICAL": 2}


class Node(NamedTuple):
    """A node's inventory at its present boot epoch, and its health as health says it is."""

    name: str
    boot_epoch: str
    gpus: tuple[Gpu, ...]
    verdict: str = "validating"
    verdict_seq: int = 0
    since_ms: int = 0
    reason: str = ""

    @property
    def takes_work(self) -> bool:
        return self.verdict in TAKES_WORK


class Part(NamedTuple):
    """One node's share of an attempt, from placed to released."""

    allocation: Allocation
    started_ms: int | None = None
    exited: AttemptExited | None = None
    released_ms: int | None = None
    sealed: bool = False
    lost: bool = False


class Attempt(NamedTuple):
    """One try: its parts, and what is known of its end. `fence` is the sequence of the decision that placed it."""

    number: int
    fence: int
    placed_ms: int
    parts: tuple[Part, ...]
    preflight: Literal["fresh", "required"]
    stop: StopReason | None = None
    stop_ms: int = 0
    grace_ms: int = 0
    preflight_failed: tuple[str, ...] | None = None
    attribution: JobFailureAttributed | None = None

    @property
    def released(self) -> bool:
        return all(part.released_ms is not None for part in self.parts)

    @property
    def failed(self) -> AttemptExited | None:
        """The first part that failed without having been asked to stop."""
        exits = [p.exited for p in self.parts if p.exited and p.exited.asked is None and p.exited.outcome != "ok"]
        return exits[0] if exits else None

    @property
    def started_ms(self) -> int | None:
        starts = [p.started_ms for p in self.parts if p.started_ms is not None]
        return min(starts) if starts else None


class Exclusion(NamedTuple):
    """A node that the job avoids, until the node has passed a test again or the time has come."""

    node: str
    seq: int
    until_ms: int


class Job(NamedTuple):
    """A job and its present attempt. `seq` is its place in the queue, kept for ever."""

    id: str
    seq: int
    spec: JobSpec
    code: str | None
    submitted_ms: int
    state: JobState = "queued"
    cancel: bool = False
    attempt: Attempt | None = None
    attempts: int = 0
    retries: int = 0
    gpu_ms: int = 0
    exclusions: tuple[Exclusion, ...] = ()
    not_before_ms: int = 0
    reasons: tuple[Reason, ...] = ()
    outcome: Outcome | None = None
    problem: Problem | None = None

    @property
    def order(self) -> tuple[int, int]:
        return (-CLASS_VALUE[self.spec.compute.priority_class], self.seq)


@dataclass(slots=True)
class State:
    """Everything the scheduler knows at sequence `seq`."""

    seq: int = 0
    at_ms: int = 0
    decision_seq: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    queued: dict[str, None] = field(default_factory=dict)
    active: dict[str, None] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    owner: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)
    tested: dict[tuple[str, ...], int] = field(default_factory=dict)
    to_announce: dict[str, Event] = field(default_factory=dict)
    voided: int = 0
    ignored: int = 0

    def free(self, node: Node) -> tuple[str, ...]:
        """GPUs of the node that no attempt holds, by index."""
        held = self.owner.get(node.name, {})
        return tuple(gpu.uuid for gpu in node.gpus if gpu.uuid not in held)

    def put(self, job: Job) -> None:
        self.jobs[job.id] = job

    def change(self, job_id: str, **fields: object) -> Job:
        job = self.jobs[job_id]._replace(**fields)  # type: ignore[arg-type]
        self.jobs[job_id] = job
        return job


def state_hash(state: State) -> str:
    """The same log gives the same hash, in every process."""
    parts = [
        (state.seq, state.decision_seq, state.voided, state.ignored),
        list(state.jobs.values()),
        [*state.queued, "|", *state.active],
        list(state.nodes.values()),
        [(n, sorted((u, *o) for u, o in held.items())) for n, held in sorted(state.owner.items())],
        sorted((list(k), v) for k, v in state.tested.items()),
        list(state.to_announce),
    ]
    return hashlib.sha256(to_json(parts)).hexdigest()
