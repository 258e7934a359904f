"""The world around the scheduler: nodes that start, run and end what is placed, on one heap of events and no clock.

All events of one instant are folded, then the scheduler decides until it has nothing more to say; what it decides is
folded at once, as its own log would do. Nothing is drawn by chance here: breakdowns arrive as happenings.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    AttemptReleased,
    AttemptStarted,
    CheckpointSaved,
    DecisionBatch,
    Event,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    LogsSealed,
    NodeJoined,
    Outcome,
    Recorded,
    Stop,
    StopReason,
)
from stoker_proto.jobs import JobEvent
from stoker_proto.nodes import NodeEvent
from stoker_scheduler.core import Scheduler

from .workload import Happening, Work, Workload

MOST_ROUNDS = 10_000  # of deciding at one instant
MOST_CHECKPOINTS = 100  # of one job: one that runs for months saves less often
IDLE_MS = 8 * 86_400_000  # a week and a day without any event: no window will open any more
Call = Callable[[], None]


class Options(NamedTuple):
    """How simulated jobs behave: how often they save a checkpoint, and what they take to save one when asked to stop.

    With `stop_ms` 0 they leave at once and save nothing; a grace shorter than `stop_ms` cuts them off, unsaved.
    """

    checkpoint_ms: int = 30 * 60_000
    stop_ms: int = 0
    until_ms: int | None = None


@dataclass(slots=True)
class Trial:
    """One attempt as the world sees it. `done_ms` is work that earlier attempts saved."""

    work: Work
    number: int
    fence: int
    nodes: tuple[str, ...]
    milli: int
    placed_ms: int
    done_ms: int
    began_ms: int | None = None
    saved_ms: int = 0
    asked: StopReason | None = None
    dead: set[str] = field(default_factory=set)
    over: bool = False
    freed: bool = False


class Witness:
    """What the world tells whoever measures it; this one does not listen."""

    def submitted(self, at_ms: int, work: Work) -> None: ...

    def happened(self, at_ms: int, event: Event) -> None: ...

    def placed(self, at_ms: int, trial: Trial, placed: AttemptPlaced) -> None: ...

    def began(self, at_ms: int, trial: Trial) -> None: ...

    def stopped(self, at_ms: int, trial: Trial, reason: StopReason) -> None: ...

    def freed(self, at_ms: int, trial: Trial, node: str) -> None: ...

    def exited(self, at_ms: int, trial: Trial, lost_ms: int) -> None: ...

    def finished(self, at_ms: int, work: Work, told: JobFinished) -> None: ...


class World:
    """Plays a workload against a scheduler. `on_event` sees every event after it was folded."""

    def __init__(
        self, scheduler: Scheduler, workload: Workload, options: Options, witness: Witness | None = None,
        on_event: Callable[[Recorded], None] | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.now_ms = workload.start_ms
        self._options = options
        self._witness = witness or Witness()
        self._on_event = on_event
        self._seq = 0
        self._heap: list[tuple[int, int, bool, Call]] = []
        self._order = 0
        self._works = {work.job_id: work for work in workload.works}
        self._trials: dict[str, Trial] = {}
        self._done: dict[str, int] = {}
        self._epochs: dict[str, str] = {}
        self._coming = len(workload.works)
        wishes = [told for told in workload.happenings if isinstance(told.event, JobEvent)]
        for told in workload.happenings:
            if not isinstance(told.event, JobEvent):
                self._at(told.at_ms, partial(self._happens, told))
        for work in sorted(workload.works, key=lambda work: work.at_ms):
            self._at(work.at_ms, partial(self._submit, work))
        for told in wishes:
            self._at(told.at_ms, partial(self._happens, told))

    def play(self) -> None:
        """Until every job is over, or nothing more can happen, or the time is up."""
        state = self.scheduler.state
        last_ms = self.now_ms
        until_ms = self._options.until_ms
        while self._coming or state.jobs:
            due_ms = self.scheduler.due_ms(self.now_ms)
            at_ms = self._heap[0][0] if self._heap else None
            if at_ms is None:
                if due_ms is None or due_ms > last_ms + IDLE_MS:
                    return
                at_ms = due_ms
            if due_ms is not None and self.now_ms < due_ms < at_ms:
                at_ms = due_ms
            if until_ms is not None and at_ms > until_ms:
                self.now_ms = until_ms
                return
            self.now_ms = max(at_ms, self.now_ms)
            wakes = due_ms is not None and due_ms <= self.now_ms
            while self._heap and self._heap[0][0] <= self.now_ms:
                _, _, wake, call = heapq.heappop(self._heap)
                call()
                wakes, last_ms = wakes or wake, self.now_ms
            if wakes:
                self._decide()

    def _at(self, at_ms: int, call: Call, *, wakes: bool = True) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_ms, self._order, wakes, call))

    def _fold(self, event: Event) -> None:
        self._seq += 1
        recorded = Recorded(self._seq, self.now_ms, b"", event)
        self.scheduler.evolve(recorded)
        if self._on_event is not None:
            self._on_event(recorded)

    def _decide(self) -> None:
        for _ in range(MOST_ROUNDS):
            decisions = self.scheduler.decide(self.now_ms)
            if not decisions:
                return
            for decision in decisions:
                self._fold(decision.event)
                self._follow(decision.event)
            # The announcements of what just held need no pass of their own.
            for event in list(self.scheduler.state.to_announce.values()):
                self._fold(event)
                self._follow(event)
        raise AssertionError(f"the scheduler never comes to rest at {self.now_ms}")

    def _follow(self, event: Event) -> None:
        """What the nodes do about what the scheduler said."""
        if isinstance(event, DecisionBatch):
            for action in event.actions:
                if isinstance(action, Stop):
                    self._stop(action)
        elif isinstance(event, AttemptPlaced):
            self._place(event)
        elif isinstance(event, JobRequeued):
            self._trials.pop(event.job_id, None)
        elif isinstance(event, JobFinished):
            self._trials.pop(event.job_id, None)
            self._done.pop(event.job_id, None)
            self._witness.finished(self.now_ms, self._works[event.job_id], event)

    def _happens(self, told: Happening) -> None:
        event = told.event
        if isinstance(event, NodeJoined):
            known = self._epochs.get(event.node)
            self._epochs[event.node] = event.boot_epoch
            if known == event.boot_epoch:
                return  # its launcher was started anew, and nothing else
            self._cut(event.node)
        elif told.breaks and isinstance(event, NodeEvent):
            self._cut(event.node)
        self._fold(event)
        self._witness.happened(self.now_ms, event)

    def _submit(self, work: Work) -> None:
        self._coming -= 1
        self._witness.submitted(self.now_ms, work)
        self._fold(
            JobSubmitted(
                job_id=work.job_id, spec=work.spec, spec_hash="", array_id=work.array_id, array_index=work.array_index
            )
        )

    def _place(self, placed: AttemptPlaced) -> None:
        work = self._works[placed.job_id]
        nodes = tuple(allocation.node for allocation in placed.allocations)
        trial = Trial(
            work=work, number=placed.attempt, fence=placed.fence, nodes=nodes, placed_ms=self.now_ms,
            milli=sum(len(allocation.gpus) * allocation.milli for allocation in placed.allocations),
            done_ms=self._done.get(work.job_id, 0),
        )  # fmt: skip
        self._trials[work.job_id] = trial
        self._witness.placed(self.now_ms, trial, placed)
        if work.launch_ms:
            self._at(self.now_ms + work.launch_ms, lambda: self._start(trial))
        else:
            self._start(trial)

    def _start(self, trial: Trial) -> None:
        if trial.over or trial.dead or trial.asked is not None:
            return
        trial.began_ms = trial.saved_ms = self.now_ms
        self._witness.began(self.now_ms, trial)
        for node in trial.nodes:
            self._fold(
                AttemptStarted(job_id=trial.work.job_id, attempt=trial.number, node=node, fence=trial.fence, ranks=(0,))
            )
        self._at(self.now_ms + trial.work.duration_ms - trial.done_ms, lambda: self._end(trial))
        self._plan_checkpoint(trial)

    def _plan_checkpoint(self, trial: Trial) -> None:
        every = self._options.checkpoint_ms
        if every:
            every = max(every, trial.work.duration_ms // MOST_CHECKPOINTS)
        if every and trial.work.duration_ms - trial.done_ms > every:
            self._at(self.now_ms + every, lambda: self._save(trial), wakes=False)

    def _save(self, trial: Trial) -> None:
        if not trial.over and not trial.dead and trial.asked is None:
            self._keep(trial)
            self._plan_checkpoint(trial)

    def _keep(self, trial: Trial) -> None:
        """What was done up to now will not have to be done again."""
        trial.done_ms += self.now_ms - trial.saved_ms
        trial.saved_ms = self.now_ms
        self._done[trial.work.job_id] = trial.done_ms
        self._fold(
            CheckpointSaved(
                job_id=trial.work.job_id, attempt=trial.number, step=trial.done_ms, path="simulated", bytes=0
            )
        )

    def _end(self, trial: Trial) -> None:
        if not trial.over and not trial.dead and trial.asked is None:
            self._exit(trial, "ok")

    def _stop(self, action: Stop) -> None:
        trial = self._trials.get(action.job_id)
        if trial is None or trial.over or trial.number != action.attempt or trial.asked is not None:
            return
        attempt = self.scheduler.state.jobs[action.job_id].attempt
        if attempt is None or attempt.stop is None:
            return  # the stop was void when it landed
        trial.asked = action.reason
        self._witness.stopped(self.now_ms, trial, action.reason)
        takes_ms = min(action.grace_ms, self._options.stop_ms)
        if 0 < self._options.stop_ms <= action.grace_ms and trial.began_ms is not None and not trial.dead:
            self._keep(trial)
        self._at(self.now_ms + takes_ms, lambda: self._exit(trial, OUTCOMES.get(action.reason, "preempted")))

    def _cut(self, node: str) -> None:
        """What ran there is gone, and nobody there will say so."""
        for trial in self._trials.values():
            if node in trial.nodes and node not in trial.dead and not trial.freed:
                self._account(trial)
                trial.dead.add(node)

    def _account(self, trial: Trial) -> None:
        """Tell how much of the attempt's time is lost; once."""
        if trial.over or trial.dead or trial.began_ms is None:
            return
        kept, ran = trial.saved_ms - trial.began_ms, self.now_ms - trial.began_ms
        if trial.done_ms + self.now_ms - trial.saved_ms >= trial.work.duration_ms:
            kept = ran
        self._witness.exited(self.now_ms, trial, ran - kept)

    def _exit(self, trial: Trial, outcome: Outcome) -> None:
        """All nodes that are still there report, free the GPUs and seal the logs."""
        if trial.over:
            return
        self._account(trial)
        trial.over = True
        for node in trial.nodes:
            if node not in trial.dead:
                self._fold(
                    AttemptExited(
                        job_id=trial.work.job_id, attempt=trial.number, node=node, fence=trial.fence, outcome=outcome,
                        asked=trial.asked,
                    )
                )  # fmt: skip
        if trial.work.release_ms:
            self._at(self.now_ms + trial.work.release_ms, lambda: self._release(trial))
        else:
            self._release(trial)

    def _release(self, trial: Trial) -> None:
        trial.freed = True
        job_id, number, fence = trial.work.job_id, trial.number, trial.fence
        for node in trial.nodes:
            if node not in trial.dead:
                self._fold(AttemptReleased(job_id=job_id, attempt=number, node=node, fence=fence, proof="simulated"))
                self._fold(LogsSealed(job_id=job_id, attempt=number, node=node, fence=fence, streams=()))
                self._witness.freed(self.now_ms, trial, node)


OUTCOMES: dict[StopReason, Outcome] = {"cancelled": "cancelled", "timeout": "timeout", "deadline": "timeout"}
