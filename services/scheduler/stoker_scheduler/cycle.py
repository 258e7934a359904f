"""`schedule(state, now_ms)`: one pass over all that waits or runs; decisions and reasons out, nothing touched.

In order: end what has ended and stop what must stop; then go through the queue, and for each job in turn place it, or
keep GPUs for it, or stop others for it, or say why it waits. A lane whose first job finds no place is left out whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from stoker_proto import Reason, Unclaim

from .attend import Watch, attend, end_waiting
from .backfill import Backfill
from .board import Board, Pass, Timing
from .boost import boost
from .claims import Claims
from .displacing import Displacing, Turns
from .explain import (
    Context,
    gate_reasons,
    held_back,
    not_looked_at,
    rejoin_reasons,
    unknown_reasons,
    why_not_placed,
)
from .layout import Layouts
from .offers import Victim
from .order import Candidate, Walk
from .queueing import lane_of
from .quota import Refusal
from .reserve import Forecast
from .rights import Rights
from .starts import Starts
from .state import Claim, Job, State
from .waiting import Lane

P = ParamSpec("P")


def schedule(state: State, now_ms: int, timing: Timing, layouts: Layouts | None = None) -> Pass:
    """Decide."""
    return Cycle(state, now_ms, timing, (layouts or Layouts())).run()


class Cycle:
    """One pass. `out` is what it decides; the board is what is left to give out."""

    def __init__(
        self, state: State, now_ms: int, timing: Timing, layouts: Layouts, watch: Watch | None = None, *,
        turns: Turns | None = None, tells: bool = True,
    ) -> None:  # fmt: skip
        self.state = state
        self.now_ms = now_ms
        self.timing = timing
        self.watch = watch or Watch()
        self.out = Pass()
        self.board = Board(state, layouts.of(state), now_ms)
        self.walk = Walk(state, self.board.tree, self.board.usage, self.board.totals, now_ms)
        self.rights = Rights(self.board)
        self.forecast = Forecast(self.board)
        self.context = Context(self.board, self.forecast)
        self.claims = Claims(self.board, self.out, self.rights, self.forecast)
        self.starts = Starts(self.board, self.out, timing)
        self.backfill = Backfill(self.board, self.out, self.starts, self.walk)
        self.displacing = Displacing(self.board, self.out, self.rights, self.claims, turns or Turns())
        self._tells = tells
        self._lanes: dict[tuple[str, Lane], tuple[Reason, ...]] = {}

    def run(self) -> Pass:
        attend(self.board, self.timing, self.out, self.watch)
        end_waiting(self.board, self.out)
        boost(self.board, self.out)
        self.claims.check()
        while not self.out.full:
            candidate = self.walk.next()
            if candidate is None:
                break
            self._consider(candidate)
        self.displacing.settle()
        return self.out

    def why(self, job: Job) -> tuple[Reason, ...]:
        """Why the job waits, as this pass saw it."""
        told = self.out.reasons.get(job.id)
        if told is not None:
            return told
        if job.gated:
            return gate_reasons(self.board, job)
        if job.queue not in self.board.tree.queues or job.class_name not in self.board.tree.classes:
            return unknown_reasons(self.board, job)
        if job.id in self.board.claims:
            return self.context.claimed(job, self.board.claims[job.id])
        return self._lanes.get((job.queue, lane_of(job))) or not_looked_at()

    def consider_alone(self, job: Job) -> tuple[tuple[Reason, ...], tuple[str, ...]]:
        """For a job that nobody has submitted: why it would wait, or the nodes it would get, after this pass."""
        board = self.board
        if job.queue not in board.tree.queues or job.class_name not in board.tree.classes:
            return unknown_reasons(board, job), ()
        gates = gate_reasons(board, job)
        if gates:
            return gates, ()
        models, refused = board.allowed(job)
        spots = None if models is None else self.starts.spots(job, models)
        if spots is None:
            lesser = self.claims.drop_outranked(job)
            models, _ = board.allowed(job)
            spots = None if models is None else self.starts.spots(job, models)
            for other in lesser:
                board.claim(other)
        if spots is not None:
            return (), tuple(board.topology.names[row] for row, _ in spots)
        if refused is not None:
            return self.context.refused(job, refused), ()
        return why_not_placed(self.context, job), ()

    def would_evict(self, job: Job) -> tuple[Victim, ...]:
        """Whom a job that nobody has submitted would displace."""
        if job.gated:
            return ()
        lesser = self.claims.drop_outranked(job)
        groups, usable = self.rights.displaces(job), self.board.usable(job)
        found = self.displacing.hunt.evict(job, groups, usable, self.state.seq)
        for other in lesser:
            self.board.claim(other)
        return found.victims if found else ()

    def _consider(self, candidate: Candidate) -> None:
        job = candidate.job
        gates = gate_reasons(self.board, job)
        if gates:
            self._blocked(candidate, gates)
            return
        if job.not_before_ms > self.now_ms:
            self.out.reasons[job.id] = (held_back(job, self.now_ms),)
            self.out.wait(job.not_before_ms)
            self.walk.skip(candidate)
            return
        for exclusion in job.exclusions:
            if exclusion.until_ms > self.now_ms:
                self.out.wait(exclusion.until_ms)
        claim, had = self.board.claims.get(job.id), None
        if claim is not None and claim.kind == "reserve":
            # Free GPUs or victims elsewhere may be had sooner; until it has those it keeps what it has.
            self.board.drop(job.id)
            claim, had = None, claim
        elif claim is not None:
            self.board.open(job.id)
        reserves = claim is None and (had is None or had.until_ms is not None)
        done, refused = self._put(candidate, claim)
        done = done or self._take(candidate, claim, reserves=reserves)
        if not done and claim is None and refused is None:
            done = self._fill(candidate) or (reserves and self._reserve(candidate))
        if not done:
            self._waits(candidate, claim, had, refused)
        elif had is not None:
            self.claims.count(had, -1)

    def _waits(
        self, candidate: Candidate, claim: Claim | None, had: Claim | None, refused: Refusal | None
    ) -> None:  # fmt: skip
        """It keeps the claim that it had, if quota still lets it; and is told why it waits."""
        job, held = candidate.job, claim or had
        if held is not None and refused is not None and not self.claims.still_held(held):
            # All that was kept is free, and quota says no: it has changed, and others may use it.
            if claim is not None:
                self.board.drop(job.id)
            self.out.actions.append(Unclaim(job_id=job.id, cause=f"queue {refused.queue} may not take it any more"))
            self._refused(candidate, self._told(self.context.refused, job, refused))
        elif claim is not None:
            self.board.keep(claim)
            self._told_alone(candidate, self._told(self.context.claimed, job, claim))
        elif had is not None:
            self.board.claim(had)
            told = self._told(self.context.claimed, job, had)
            if had.until_ms is not None:
                told = self._told(rejoin_reasons, self.context, job, had)
            self._told_alone(candidate, told)
        elif refused is not None:
            self._refused(candidate, self._told(self.context.refused, job, refused))
        else:
            self._blocked(candidate, self._told(why_not_placed, self.context, job))

    def _put(self, candidate: Candidate, claim: Claim | None) -> tuple[bool, Refusal | None]:
        done, refused = self.starts.put(candidate.job, claim)
        if done:
            self.walk.placed(candidate)
        return done, refused

    def _take(self, candidate: Candidate, claim: Claim | None, *, reserves: bool) -> bool:
        """Find room that others hold, or that is kept for them, when the lane has a right to and it is its turn."""
        job, before = candidate.job, len(self.out.actions)
        groups = self.displacing.may_evict(job) if claim is None else {}
        if not (groups or self.rights.outranked(job)) or not self.displacing.has_turn(candidate):
            return False
        lesser = self.claims.drop_outranked(job)
        done, refused = self._put(candidate, claim) if lesser else (False, None)
        if not done and groups:
            done = self._claimed(candidate, self.displacing.evict(job, groups))
        if not done and lesser and reserves and refused is None:
            done = self._reserve(candidate)
        self.claims.restore(lesser, before, job)
        if not done:
            self.displacing.in_vain(candidate)
        return done

    def _fill(self, candidate: Candidate) -> bool:
        done = self.backfill.fill(candidate.job)
        if done:
            self.walk.placed(candidate)
        return done

    def _reserve(self, candidate: Candidate) -> bool:
        return self._claimed(candidate, self.claims.reserve(candidate.job))

    def _claimed(self, candidate: Candidate, claim: Claim | None) -> bool:
        if claim is not None:
            self._told_alone(candidate, self._told(self.context.claimed, candidate.job, claim))
        return claim is not None

    def _told(self, why: Callable[P, tuple[Reason, ...]], *about: P.args, **more: P.kwargs) -> tuple[Reason, ...]:
        """Reasons, unless nobody wants them: they cost more than decisions."""
        return why(*about, **more) if self._tells else ()

    def _told_alone(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        """It waits for GPUs that are its own: the next of its lane may find others, or evict, or have some kept too."""
        self.out.reasons[candidate.job.id] = reasons
        self.walk.skip(candidate)

    def _tell_lane(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        self.out.reasons[candidate.job.id] = reasons
        self._lanes[(candidate.queue, candidate.lane)] = reasons

    def _blocked(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        """Nobody of the lane fits, but for some that will be gone soon."""
        self._tell_lane(candidate, reasons)
        self.backfill.fill_behind(candidate)
        self.walk.drop_lane(candidate)

    def _refused(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        """Quota says no. A boosted job is not overtaken inside its queue, so that small ones cannot use it up."""
        self._tell_lane(candidate, reasons)
        if not candidate.job.boosted:
            self.walk.drop_lane(candidate)
            return
        behind = self.context.behind(candidate.job)
        for lane, first in self.walk.drop_queue(candidate.queue):
            if lane != candidate.lane:
                self.out.reasons[first] = self._lanes[(candidate.queue, lane)] = behind
