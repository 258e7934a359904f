"""The scheduler as the leader loop sees it: fold, decide, and the next moment worth waking up for."""

from __future__ import annotations

from stoker_chassis.eventlog import Expect
from stoker_chassis.service import Decision
from stoker_proto import DecisionBatch, PendingReasonChanged, Reason, Recorded
from stoker_proto.subjects import DECISIONS

from .apply import announcements
from .cycle import Pass, Timing, schedule
from .evolve import evolve
from .state import Job, State

DETAILED_REASONS = 50  # jobs at the front of the queue whose numbers are kept current; the rest only when codes change


class Scheduler:
    """Folds the log and decides; the guard on the decisions' subject refuses a batch that was decided on old news."""

    def __init__(self, timing: Timing) -> None:
        self.state = State()
        self._timing = timing
        self._due_ms: int | None = None

    def evolve(self, recorded: Recorded) -> None:
        self.state = evolve(self.state, recorded)

    def decide(self, now_ms: int) -> list[Decision]:
        state = self.state
        out = [Decision(event, None, key) for key, event in announcements(state)]
        done = schedule(state, now_ms, self._timing)
        self._due_ms = done.due_ms
        if done.actions:
            batch = DecisionBatch(based_on_seq=state.seq, actions=tuple(done.actions))
            out.append(Decision(batch, Expect(DECISIONS, state.decision_seq), None))
        out += [Decision(event, None, None) for event in changed_reasons(state, done)]
        return out

    def due_ms(self, now_ms: int) -> int | None:
        return self._due_ms


def changed_reasons(state: State, done: Pass) -> list[PendingReasonChanged]:
    """Reasons that differ from the ones last told."""
    events = []
    for place, (job_id, reasons) in enumerate(done.reasons.items()):
        job = state.jobs[job_id]
        if reasons and _differs(job, reasons, detailed=place < DETAILED_REASONS):
            events.append(PendingReasonChanged(job_id=job_id, reasons=reasons))
    return events


def _differs(job: Job, reasons: tuple[Reason, ...], *, detailed: bool) -> bool:
    if [r.code for r in job.reasons] != [r.code for r in reasons]:
        return True
    return detailed and [r.message for r in job.reasons] != [r.message for r in reasons]
