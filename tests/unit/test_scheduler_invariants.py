"""Invariants of the scheduler, after every event of random histories: joins, faults, cancels, ends, reboots, time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from stoker_proto import (
    CancelRequested,
    Event,
    JobFailureAttributed,
    NodeQuarantined,
    NodeReleased,
    NodeUnknown,
    problem,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.evolve import evolve
from stoker_scheduler.state import State, state_hash
from tests.builders import exited, joined, ready, released, sealed, started, submitted
from tests.unit.scheduler_cluster import Cluster

NODES = ("n1", "n2", "n3", "n4")


class WatchedCluster(Cluster):
    """A cluster that checks every invariant after every single event, its own decisions included."""

    def __init__(self) -> None:
        super().__init__(Timing(fresh_ms=60_000, start_deadline_ms=60_000, fence_ms=30_000))
        self.attempts_seen: dict[str, int] = {}
        self.cancelled_at: dict[str, int] = {}

    def fold(self, event: Event) -> None:
        super().fold(event)
        self.check()

    def check(self) -> None:
        state = self.scheduler.state
        held: dict[tuple[str, str], tuple[str, int]] = {}
        for job in state.jobs.values():
            seen = self.attempts_seen.get(job.id, 0)
            assert job.attempts >= seen, "attempt numbers only rise"
            self.attempts_seen[job.id] = job.attempts
            if job.cancel:
                assert self.cancelled_at.setdefault(job.id, job.attempts) == job.attempts, "no new attempt after cancel"
            assert (job.state == "queued") == (job.id in state.queued)
            assert (job.state == "active") == (job.id in state.active)
            if job.state != "active":
                assert job.attempt is None, "only an active job has an attempt"
                continue
            assert job.attempt is not None
            assert len(job.attempt.parts) == job.spec.compute.nodes, "a gang is whole"
            for part in job.attempt.parts:
                assert len(part.allocation.gpus) == job.spec.compute.per_node
                if part.released_ms is None:
                    for gpu in part.allocation.gpus:
                        key = (part.allocation.node, gpu)
                        assert key not in held, f"{key} has two owners"
                        held[key] = (job.id, job.attempt.number)
        ledger = {(n, gpu): owner for n, gpus in state.owner.items() for gpu, owner in gpus.items()}
        assert ledger == held, "the ledger is exactly what the attempts hold"
        for node in state.nodes.values():
            assert {gpu for n, gpu in ledger if n == node.name} <= {g.uuid for g in node.gpus}


class Histories(RuleBasedStateMachine):
    jobs: Bundle[str] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.cluster = WatchedCluster()
        self.count = 0
        self.epochs = dict.fromkeys(NODES, 0)

    def epoch(self, node: str) -> str:
        return f"b{self.epochs[node]}"

    @rule(node=st.sampled_from(NODES))
    def reboot(self, node: str) -> None:
        self.epochs[node] += 1
        self.cluster.tell(joined(node, epoch=self.epoch(node)))

    @rule(node=st.sampled_from(NODES), kind=st.sampled_from(["ready", "quarantined", "released", "unknown"]))
    def verdict(self, node: str, kind: str) -> None:
        fields = {"node": node, "boot_epoch": self.epoch(node), "rule": "r", "reason": "why"}
        made: dict[str, Event] = {
            "ready": ready(node, self.epoch(node)),
            "quarantined": NodeQuarantined.model_validate(fields),
            "released": NodeReleased.model_validate(fields),
            "unknown": NodeUnknown.model_validate(fields),
        }
        self.cluster.tell(made[kind])

    @rule(
        target=jobs,
        nodes=st.integers(1, 3),
        per_node=st.integers(1, 2),
        priority=st.sampled_from(["NORMAL", "CRITICAL"]),
    )
    def submit(self, nodes: int, per_node: int, priority: str) -> str:
        self.count += 1
        job_id = f"j{self.count}"
        self.cluster.tell(submitted(job_id, nodes=nodes, per_node=per_node, priority_class=priority))
        return job_id

    @rule(job_id=consumes(jobs))
    def cancel(self, job_id: str) -> None:
        self.cluster.tell(CancelRequested(job_id=job_id))

    @rule(job_id=jobs)
    def start(self, job_id: str) -> None:
        attempt = self.cluster.job(job_id).attempt
        if attempt is not None:
            for part in attempt.parts:
                self.cluster.tell(started(job_id, attempt.number, part.allocation.node, attempt.fence))

    @rule(
        job_id=jobs,
        which=st.integers(0, 2),
        how=st.sampled_from(["ok", "user_error", "infra_gpu"]),
        stale=st.booleans(),
    )
    def end_part(self, job_id: str, which: int, how: str, stale: bool) -> None:
        attempt = self.cluster.job(job_id).attempt
        if attempt is None:
            return
        node = attempt.parts[which % len(attempt.parts)].allocation.node
        number, fence = (attempt.number, attempt.fence) if not stale else (attempt.number - 1, attempt.fence - 1)
        if attempt.stop is not None:
            self.cluster.tell(exited(job_id, number, node, fence, "cancelled", asked=attempt.stop))
        else:
            self.cluster.tell(exited(job_id, number, node, fence, how))  # type: ignore[arg-type]
        self.cluster.tell(released(job_id, number, node, fence))
        self.cluster.tell(sealed(job_id, number, node, fence))

    @rule(job_id=jobs, retry=st.booleans())
    def attribute(self, job_id: str, retry: bool) -> None:
        job = self.cluster.job(job_id)
        if job.attempt is None or job.attempt.failed is None:
            return
        event = JobFailureAttributed(
            job_id=job_id, attempt=job.attempt.number, outcome="infra_gpu" if retry else "user_error", blame="unknown",
            confidence="hypothesis", retry=retry,
            problem=problem("gpu_fault" if retry else "python_exception", "because"),
        )  # fmt: skip
        self.cluster.tell(event)

    @rule(ms=st.integers(1, 100_000))
    def wait(self, ms: int) -> None:
        self.cluster.later(ms)

    @invariant()
    def deciding_again_without_news_decides_nothing(self) -> None:
        assert self.cluster.scheduler.decide(self.cluster.log.at_ms) == []

    @invariant()
    def every_waiting_job_has_a_reason(self) -> None:
        state = self.cluster.scheduler.state
        assert all(state.jobs[j].reasons for j in state.queued)

    def teardown(self) -> None:
        """The whole history folds to the same state again, and so does a second fold over a copy of the log."""
        fresh = State()
        for recorded in self.cluster.log.records:
            fresh = evolve(fresh, recorded)
        assert state_hash(fresh) == state_hash(self.cluster.scheduler.state)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_second_scheduler_agrees_after_every_event() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("a", nodes=2), submitted("b"), submitted("c", nodes=3))
    cluster.start("a")
    cluster.end("a")
    one, two = Scheduler(Timing()), Scheduler(Timing())
    for recorded in cluster.log.records:
        one.evolve(recorded)
        two.evolve(recorded)
        assert state_hash(one.state) == state_hash(two.state)
