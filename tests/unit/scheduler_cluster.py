"""A cluster around the scheduler's core: its decisions land in a list log and are folded like any other event."""

from __future__ import annotations

from typing import Any

from stoker_proto import Cluster as Configuration
from stoker_proto import ClusterConfigured, DecisionBatch, Event, JobFinished, JobSubmitted, Stop
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.invariants import violations
from stoker_scheduler.state import Attempt, Job, State
from tests.builders import ListLog, exited, joined, ready, released, sealed, started


class Cluster:
    """Events in, decisions out: `tell` folds events and lets the scheduler decide until it has nothing more to say.

    With `check` every invariant is asserted after every event.
    """

    def __init__(self, timing: Timing | None = None, *, check: bool = False) -> None:
        self.log = ListLog()
        self._timing = timing or Timing()
        self.scheduler = Scheduler(self._timing)
        self._check = check

    def fold(self, event: Event) -> None:
        self.scheduler.evolve(self.log.append(event))
        if self._check:
            assert violations(self.scheduler.state) == [], f"after {event}"

    def tell(self, *events: Event) -> None:
        for event in events:
            self.fold(event)
        self.decide()

    def decide(self) -> list[Event]:
        told: list[Event] = []
        for _ in range(50):
            decisions = self.scheduler.decide(self.log.at_ms)
            if not decisions:
                return told
            for decision in decisions:
                told.append(decision.event)
                self.fold(decision.event)
        raise AssertionError("the scheduler never comes to rest")

    def later(self, ms: int) -> list[Event]:
        self.log.at_ms += ms
        return self.decide()

    def restart(self) -> None:
        """A new scheduler takes over: all it knows is the log."""
        self.scheduler = Scheduler(self._timing)
        for recorded in self.log.records:
            self.scheduler.evolve(recorded)

    def nodes(self, *names: str, gpus: int = 2) -> None:
        for name in names:
            self.tell(joined(name, gpus), ready(name))

    def configure(self, **fields: Any) -> None:
        """Share the cluster by this configuration from here on."""
        cluster = Configuration.model_validate(fields)
        self.tell(ClusterConfigured(version=self.state.version + 1, cluster=cluster))

    def run(self, *jobs: JobSubmitted) -> None:
        """Submit jobs that find a place, and let them start."""
        for job in jobs:
            self.tell(job)
            self.start(job.job_id)

    def preempted(self) -> list[str]:
        """Jobs that were told to give way, in that order, as often as they were."""
        batches = [r.event for r in self.log.records if isinstance(r.event, DecisionBatch)]
        return [a.job_id for b in batches for a in b.actions if isinstance(a, Stop) and a.reason == "preempted"]

    def codes(self, job_id: str) -> list[str]:
        """Why the job waits."""
        return [reason.code for reason in self.job(job_id).reasons]

    @property
    def state(self) -> State:
        return self.scheduler.state

    def job(self, job_id: str) -> Job:
        """A job that waits or is active."""
        return self.state.jobs[job_id]

    def ended(self, job_id: str) -> JobFinished:
        """How a job that is over ended."""
        assert job_id in self.state.over, f"{job_id} is {self.state.jobs[job_id].state}"
        told = [r.event for r in self.log.records if isinstance(r.event, JobFinished) and r.event.job_id == job_id]
        assert len(told) == 1
        return told[0]

    def attempt(self, job_id: str) -> Attempt:
        attempt = self.job(job_id).attempt
        assert attempt is not None
        return attempt

    def places(self, job_id: str) -> tuple[str, ...]:
        attempt = self.job(job_id).attempt
        return tuple(p.allocation.node for p in attempt.parts) if attempt else ()

    def start(self, job_id: str) -> None:
        attempt = self.attempt(job_id)
        self.tell(*(started(job_id, attempt.number, node, attempt.fence) for node in self.places(job_id)))

    def end(self, job_id: str) -> None:
        """Every node reports success, frees its GPUs and seals its logs."""
        attempt = self.attempt(job_id)
        for node in self.places(job_id):
            self.tell(exited(job_id, attempt.number, node, attempt.fence))
            self.tell(released(job_id, attempt.number, node, attempt.fence))
        for part in attempt.parts:
            self.tell(sealed(job_id, attempt.number, part.allocation.node, attempt.fence))

    def stopped(self, job_id: str) -> None:
        """Every node that has not reported yet says that it stopped as asked, and frees its GPUs."""
        attempt = self.attempt(job_id)
        for part in attempt.parts:
            node = part.allocation.node
            if part.exited is None:
                self.tell(exited(job_id, attempt.number, node, attempt.fence, "cancelled", asked=attempt.stop))
            self.tell(released(job_id, attempt.number, node, attempt.fence))
        for part in attempt.parts:
            self.tell(sealed(job_id, attempt.number, part.allocation.node, attempt.fence))
