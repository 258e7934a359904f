"""A cluster around the scheduler's core: its decisions land in a list log and are folded like any other event."""

from __future__ import annotations

from stoker_proto import Event, JobFinished
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.state import Attempt, Job, State
from tests.builders import ListLog, exited, joined, ready, released, sealed, started


class Cluster:
    """Events in, decisions out: `tell` folds events and lets the scheduler decide until it has nothing more to say."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.log = ListLog()
        self.scheduler = Scheduler(timing or Timing())

    def fold(self, event: Event) -> None:
        self.scheduler.evolve(self.log.append(event))

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

    def nodes(self, *names: str, gpus: int = 2) -> None:
        for name in names:
            self.tell(joined(name, gpus), ready(name))

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
