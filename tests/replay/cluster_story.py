"""A small cluster's whole story, with a scheduler that can be lost after any event and launchers that cannot.

Nodes, launchers and users are a world of their own: they know what really runs where, and act on the desired state
that the scheduler's state projects. What the scheduler believes is checked against what really runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from stoker_proto import (
    Assignment,
    CancelRequested,
    Cluster,
    ClusterConfigured,
    Event,
    HoldReleased,
    JobFailureAttributed,
    JobFinished,
    LeaderElected,
    NodeJoined,
    NodeQuarantined,
    NodeReleased,
    NodeUnknown,
    Outcome,
    Recorded,
    problem,
    seal,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.desired import desired
from stoker_scheduler.invariants import violations
from stoker_scheduler.state import Attempt
from tests.builders import exited, joined, ready, released, sealed, started, submitted

TICK_MS = 10_000
TIMING = Timing(fresh_ms=60_000, start_deadline_ms=120_000, fence_ms=30_000)
NODES = ("n1", "n2", "n3", "n4", "far")  # far is the only one with BIG GPUs
CLUSTER = Cluster.model_validate(
    {
        "queues": [
            {"name": "default"},
            {"name": "team", "gpus": {"nominal": 4}},
            {"name": "agents", "gpus": {"nominal": 2}},
        ],
        "scheduling": {"min_run_minutes": 0, "first_checkpoint_minutes": 0},
    }
)  # fmt: skip


def _joined(node: str, epoch: str = "b1") -> NodeJoined:
    return joined(node, epoch=epoch, model="BIG" if node == "far" else "SIM")


def _script() -> dict[int, list[Event]]:
    """What users, node checks and fate do, by tick."""
    found: dict[int, list[Event]] = {
        0: [ClusterConfigured(version=1, cluster=CLUSTER), *(e for n in NODES for e in (_joined(n), ready(n)))],
        1: [
            submitted("gang", nodes=2, queue="agents"),
            submitted("waiter", schedule={"after": [{"job": "gang"}]}),
            submitted("held", schedule={"hold": True}),
            submitted("half-1", per_node=1, gpu_fraction=0.5),
            submitted("half-2", per_node=1, gpu_fraction=0.5),
        ],
        2: [submitted("urgent", priority_class="CRITICAL"), submitted("doomed"), submitted("flaky")],
        3: [submitted("due", nodes=2, queue="team"), CancelRequested(job_id="doomed")],
        4: [NodeQuarantined(node="n3", boot_epoch="b1", rule="xid", reason="XID 79"), HoldReleased(job_id="held")],
        6: [NodeReleased(node="n3", boot_epoch="b1", rule="re-test", reason="passed"), submitted("big", nodes=4)],
        9: [joined("n2", epoch="b2"), ready("n2", "b2"), submitted("late", queue="agents")],
        11: [submitted("cut-off", model="BIG")],
        12: [NodeUnknown(node="far", boot_epoch="b1", rule="silence", reason="no heartbeat")],
        17: [_joined("far", "b2"), ready("far", "b2")],
        # Waits for a job that was over long before: whoever takes over must know how it ended.
        20: [submitted("epilogue", schedule={"after": [{"job": "half-1"}]})],
        18: [submitted("last", nodes=2, priority_class="CRITICAL"), CancelRequested(job_id="late")],
    }
    for tick in range(1, 11):
        job = submitted(f"small-{tick}", per_node=1 + tick % 2, queue=("team", "agents")[tick % 2])
        found.setdefault(tick, []).append(job)
    return found


SCRIPT = _script()


def _standing(attempt: Attempt) -> object:
    parts = [
        (p.allocation, p.started_ms is None, p.exited and p.exited.outcome, p.released_ms is None, p.sealed, p.lost)
        for p in attempt.parts
    ]
    return attempt.number, attempt.stop, attempt.by, parts


@dataclass
class Process:
    """What really runs on a node."""

    job_id: str
    attempt: int
    fence: int
    node: str
    gpus: tuple[str, ...]
    milli: int
    left: int
    stopping: bool = False


def new_scheduler() -> Scheduler:
    return Scheduler(TIMING, tells=False)


@dataclass
class Story:
    """Plays the script tick by tick.

    `lose_after`: the scheduler is lost right after that event, and another one takes over; `lose_every`: after each so
    many events.
    """

    script: dict[int, list[Event]] = field(default_factory=lambda: SCRIPT)
    lose_after: int = 0
    lose_every: int = 0
    check: bool = False
    records: list[Recorded] = field(default_factory=list)
    scheduler: Scheduler = field(default_factory=new_scheduler)
    processes: dict[tuple[str, int, str], Process] = field(default_factory=dict)
    done: set[tuple[str, int, str]] = field(default_factory=set)
    at_ms: int = 1_000_000
    tick: int = 0
    failed: bool = False
    _ids: set[str] = field(default_factory=set)
    _last: dict[str, int] = field(default_factory=dict)

    def ticks(self) -> Iterator[Story]:
        """Itself before each tick, until all is over."""
        if not self.records:
            self._append(LeaderElected(service="scheduler", holder="first"))
        while self.tick <= max(self.script) or self.scheduler.state.jobs:
            assert self.tick < 100, f"never over: {list(self.scheduler.state.jobs)}"
            yield self
            self._turn()

    def copy(self, lose_after: int) -> Story:
        """The same story up to here, to go on otherwise from here."""
        other = replace(
            self, lose_after=lose_after, records=self.records.copy(), scheduler=new_scheduler(), done=self.done.copy(),
            processes={key: replace(process) for key, process in self.processes.items()},
            _ids=self._ids.copy(), _last=self._last.copy(),
        )  # fmt: skip
        other._take_over()
        return other

    def _take_over(self) -> None:
        """Another scheduler, that knows what the log says."""
        self.scheduler = new_scheduler()
        for recorded in self.records:
            self.scheduler.evolve(recorded)

    def _turn(self) -> None:
        for event in self.script.get(self.tick, ()):
            if isinstance(event, NodeJoined):
                self._dies(event.node)
            self._tell(event)
        for node in NODES:
            if self._answers(node):
                self._launcher(node)
        self.tick += 1
        self.at_ms += TICK_MS
        self._decide()

    def _answers(self, node: str) -> bool:
        """Far is cut off from tick 12 on until it boots again; its launcher stops what runs there at tick 14."""
        if node != "far" or not 12 <= self.tick < 17:
            return node in self.scheduler.state.nodes
        if self.tick == 14:
            self._dies(node)
        return False

    def _dies(self, node: str) -> None:
        for key in [key for key in self.processes if key[2] == node]:
            del self.processes[key]
            self.done.add(key)

    def _append(self, event: Event, id: str | None = None) -> None:
        seq = len(self.records) + 1
        id = id or f"e{seq}"
        if id in self._ids:
            return
        self._ids.add(id)
        envelope = seal(event, id=id, source="story", time="2026-01-01T00:00:00Z", actor="story")
        self._last[envelope.subject] = seq
        self.records.append(Recorded(seq, self.at_ms, envelope, event))
        self.scheduler.evolve(self.records[-1])
        if self.check:
            assert violations(self.scheduler.state) == [], f"after {event}"
        if isinstance(event, LeaderElected):
            return
        if seq == self.lose_after or (self.lose_every and seq % self.lose_every == 0):
            self._take_over()
            self._append(LeaderElected(service="scheduler", holder="second"))

    def _tell(self, event: Event) -> None:
        self._append(event)
        self._decide()

    def _decide(self) -> None:
        for _ in range(500):
            leader = self.scheduler
            decisions = leader.decide(self.at_ms)
            if not decisions:
                return
            for decision in decisions:
                expect = decision.expect
                assert expect is None or self._last.get(expect.subject, 0) == expect.seq
                self._append(decision.event, decision.id)
                if self.scheduler is not leader:
                    break  # lost with all that it had still to say
        raise AssertionError("the scheduler never comes to rest")

    def _launcher(self, node: str) -> None:
        """What one launcher does in a tick about its desired state."""
        wanted = {(a.job_id, a.attempt, node): a for a in desired(self.scheduler.state)[node].attempts}
        for key in [key for key in self.processes if key[2] == node]:
            process = self.processes[key]
            assignment = wanted.get(key)
            if assignment is None or assignment.want == "stop":
                if process.stopping:
                    self._leaves(process, "cancelled", assignment)
                process.stopping = True
            else:
                process.left -= 1
                if not process.left:
                    fails = process.job_id == "flaky" and not self.failed
                    self.failed = self.failed or fails
                    self._leaves(process, "infra_gpu" if fails else "ok", None)
        for key, assignment in wanted.items():
            if key not in self.processes and key not in self.done:
                held = next(a for a in assignment.allocations if a.node == node)
                process = Process(*key[:2], assignment.fence, node, held.gpus, held.milli, left=2 + len(key[0]) % 3)
                if assignment.want == "run":
                    self._starts(process)
                else:
                    self._leaves(process, "cancelled", assignment)

    def _starts(self, process: Process) -> None:
        for other in self.processes.values():
            same = other.job_id == process.job_id
            assert not same or other.attempt == process.attempt, f"{process} beside {other}"
        for gpu in process.gpus:
            held = sum(p.milli for p in self.processes.values() if p.node == process.node and gpu in p.gpus)
            assert held + process.milli <= 1000, f"{gpu} has two owners: {process} and others"
        self.processes[(process.job_id, process.attempt, process.node)] = process
        self._tell(started(process.job_id, process.attempt, process.node, process.fence))

    def _leaves(self, process: Process, outcome: Outcome, assignment: Assignment | None) -> None:
        key = (process.job_id, process.attempt, process.node)
        self.processes.pop(key, None)
        self.done.add(key)
        asked = assignment.stop_reason if assignment else None
        at = (process.job_id, process.attempt, process.node, process.fence)
        for event in (exited(*at, outcome, asked), released(*at), sealed(*at)):
            self._tell(event)
        if outcome == "infra_gpu":
            told = problem("gpu_fault", "XID 79")
            self._tell(
                JobFailureAttributed(
                    job_id=process.job_id, attempt=process.attempt, outcome=outcome, blame="node",
                    confidence="supported", node=process.node, retry=True, exclude_nodes=(process.node,), problem=told,
                )
            )  # fmt: skip

    def ends(self) -> dict[str, str]:
        """How each job ended; told once."""
        told = [r.event for r in self.records if isinstance(r.event, JobFinished)]
        assert len({t.job_id for t in told}) == len(told), "an end was told twice"
        return {t.job_id: t.state for t in told}

    def standing(self) -> object:
        """All that decides how the story goes on, without sequences and times."""
        state = self.scheduler.state
        jobs = [
            (job.id, job.state, job.cancel, job.held, job.waits_for, job.boosted, job.attempts, job.retried,
             job.preemptions, job.blamed, [e.node for e in job.exclusions], job.attempt and _standing(job.attempt))
            for job in state.jobs.values()
        ]  # fmt: skip
        nodes = [(n.name, n.boot_epoch, n.verdict, n.strikes) for n in state.nodes.values()]
        claims = [(claim.job_id, claim.kind, claim.allocations) for claim in state.claims.values()]
        processes = [replace(p, fence=0) for p in self.processes.values()]
        return sorted(jobs, key=str), nodes, sorted(claims, key=str), state.over, sorted(processes, key=str)

    def leaks(self) -> list[str]:
        """GPUs that are held by nobody who runs, and processes that hold what they should not."""
        state = self.scheduler.state
        held = [f"{node}: {gpus}" for node, gpus in state.owner.items() if gpus]
        free = [f"{n}: {state.capacity.left(n)}" for n in state.nodes if set(state.capacity.left(n)[0]) != {1000}]
        return [*held, *free, *map(str, self.processes.values()), *state.claims, *map(str, violations(state))]
