"""The scheduler as the leader loop sees it: fold, decide, and the next moment worth waking up for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from stoker_chassis.eventlog import Expect
from stoker_chassis.service import Decision
from stoker_proto import (
    DecisionBatch,
    Event,
    PendingReasonChanged,
    Reason,
    Recorded,
    Window,
    WindowClosed,
    WindowOpened,
)
from stoker_proto.subjects import DECISIONS

from . import snapshot
from .announce import announcements
from .attend import Watch
from .board import Pass, Timing
from .cycle import Cycle
from .displacing import Turns
from .evolve import HANDLERS, evolve
from .invariants import violations
from .layout import Layouts
from .state import Job, State
from .windows import Turn, turn, zone_data

DETAILED_REASONS = 50  # jobs at the front of the queue whose numbers are kept current; the rest only when codes change
FIRST_REASONS = 200  # jobs that are told for the first time why they wait, in one pass
REASONS_EVERY_MS = 1_000  # numbers alone change no faster than this
log = logging.getLogger(__name__)
Calendar = Callable[[Window, int], Turn | None]


class Scheduler:
    """Folds the log and decides; the guard on the decisions' subject refuses a batch that was decided on old news."""

    schema = "3"  # of the fold: code that folds otherwise changes it
    wants = frozenset(cls.type_name for cls in HANDLERS)

    def __init__(self, timing: Timing, calendar: Calendar = turn, check_every: int = 0, *, tells: bool = True) -> None:
        self.state = State()
        self.layouts = Layouts()
        self.watch = Watch()
        self._turns = Turns()
        self._timing = timing
        self._calendar = calendar
        self._check_every = check_every
        self._tells = tells  # why jobs wait
        self._due_ms: int | None = None
        self._told_ms: dict[str, int] = {}

    def evolve(self, recorded: Recorded) -> None:
        self.state = evolve(self.state, recorded)
        if self._check_every and recorded.seq % self._check_every == 0:
            for told in violations(self.state):
                log.error("invariant violated at %d: %s", recorded.seq, told)

    def dump(self) -> bytes:
        return snapshot.dump(self.state)

    def load(self, data: bytes) -> None:
        self.state = snapshot.load(data)
        self.layouts = Layouts()
        self.watch = Watch()

    def cycle(self, now_ms: int, turns: Turns | None = None) -> Cycle:
        """A pass over the present state, that has been run."""
        cycle = Cycle(self.state, now_ms, self._timing, self.layouts, self.watch, turns=turns, tells=self._tells)
        cycle.run()
        return cycle

    def decide(self, now_ms: int) -> list[Decision]:
        state = self.state
        out = [Decision(event, None, key) for key, event in announcements(state)]
        turned, next_ms = self._windows(now_ms)
        out += turned
        cycle = self.cycle(now_ms, self._turns)
        done = cycle.out
        if next_ms is not None:
            done.wait(next_ms)
        if done.actions:
            batch = DecisionBatch(based_on_seq=state.seq, actions=tuple(done.actions))
            out.append(Decision(batch, Expect(DECISIONS, state.decision_seq), None))
        if self._tells:
            out += [Decision(event, None, None) for event in self._changed_reasons(cycle, now_ms)]
        self._due_ms = done.due_ms
        return out

    def due_ms(self, now_ms: int) -> int | None:
        return self._due_ms

    def _windows(self, now_ms: int) -> tuple[list[Decision], int | None]:
        """Windows that turned, and when the next one will."""
        out: list[Decision] = []
        next_ms: int | None = None
        for window in self.state.cluster.windows:
            now = self._calendar(window, now_ms)
            if now is None:
                continue
            next_ms = now.until_ms if next_ms is None else min(next_ms, now.until_ms)
            if self.state.windows.get(window.name) != now.opened:
                kind = WindowOpened if now.opened else WindowClosed
                event: Event = kind(window=window.name, at_ms=now.since_ms, zones=zone_data())
                key = f"window:{window.name}:{self.state.version}:{now.since_ms}:{now.opened}"
                out.append(Decision(event, None, key))
        return out, next_ms

    def _changed_reasons(self, cycle: Cycle, now_ms: int) -> list[PendingReasonChanged]:
        """Reasons that differ from the ones last told: of jobs at the front, and of some that were never told any."""
        events = []
        done = cycle.out
        for place, (job_id, reasons) in enumerate(done.reasons.items()):
            job = self.state.jobs[job_id]
            if reasons and self._differs(job, reasons, now_ms, done, detailed=place < DETAILED_REASONS):
                events.append(PendingReasonChanged(job_id=job_id, reasons=reasons))
                self._told_ms[job_id] = now_ms
        known = {event.job_id for event in events}
        placed = {getattr(action, "job_id", None) for action in done.actions if action.action == "place"}
        for job_id in _first(self.state.untold, FIRST_REASONS):
            if job_id not in known and job_id not in placed and not self.state.jobs[job_id].cancel:
                events.append(PendingReasonChanged(job_id=job_id, reasons=cycle.why(self.state.jobs[job_id])))
        for job_id in [j for j in self._told_ms if j not in self.state.waiting]:
            del self._told_ms[job_id]
        return events

    def _differs(self, job: Job, reasons: tuple[Reason, ...], now_ms: int, done: Pass, *, detailed: bool) -> bool:
        if [r.code for r in job.reasons] != [r.code for r in reasons]:
            return True
        if not detailed or [r.message for r in job.reasons] == [r.message for r in reasons]:
            return False
        next_ms = self._told_ms.get(job.id, 0) + REASONS_EVERY_MS
        if now_ms >= next_ms:
            return True
        done.wait(next_ms)
        return False


def _first(names: Iterable[str], most: int) -> list[str]:
    found = []
    for name in names:
        found.append(name)
        if len(found) == most:
            break
    return found
