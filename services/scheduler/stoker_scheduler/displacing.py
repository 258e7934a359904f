"""Displacing others: who has a right to and when, whose turn it is to look, and the stops that follow.

Looking for victims takes long, so only so many lanes look in one pass; those that looked in vain let the others go
first. A cluster may also limit how many jobs are preempted in a minute.
"""

from __future__ import annotations

from stoker_proto import PreemptRule, Stop

from .board import Board, Pass
from .claims import Claims
from .order import Candidate
from .rights import Group, Rights
from .state import Claim, Job
from .victims import Hunt, grace_ms

MOST_HUNTS = 12  # looks for victims in one pass, each by another lane
HUNT_AGAIN_MS = 1_000  # until the next pass, when not every lane could look
MINUTE_MS = 60_000


class Turns:
    """Whose turn it is to look for victims, when more lanes want to than a pass has time for.

    Kept from pass to pass: who has looked in vain lets the others look first. Each with the sequence that it looked at
    and the moment from which on it may find more.
    """

    def __init__(self) -> None:
        self.looked: dict[object, tuple[int, int | None]] = {}


class Displacing:
    """The pass's looks for victims, and what is left of them."""

    def __init__(self, board: Board, out: Pass, rights: Rights, claims: Claims, turns: Turns) -> None:
        self.board = board
        self.out = out
        self.rights = rights
        self.claims = claims
        self.hunt = Hunt(board)
        self._turns = turns
        self._hunts = 0
        self._look_again = self._passed_over = False
        self._left = self._budget()

    def _budget(self) -> int:
        state, now_ms = self.board.state, self.board.now_ms
        lately = [t for t in state.preempted_ms if t > now_ms - MINUTE_MS]
        left = state.cluster.scheduling.preemptions_per_minute - len(lately)
        if left <= 0 and lately:
            self.out.wait(lately[0] + MINUTE_MS + 1)
        return left

    def may_evict(self, job: Job) -> dict[Group, tuple[PreemptRule, int]]:
        """Whom the job may displace now, if anybody."""
        if self._left <= 0:
            return {}
        groups = self.rights.displaces(job)
        since = job.since_ms + int(self.board.state.cluster.scheduling.preempt_after_seconds * 1000)
        if groups and since > self.board.now_ms:
            self.out.wait(since)
            return {}
        return groups

    def has_turn(self, candidate: Candidate) -> bool:
        """Whether the lane may look at others' GPUs in this pass."""
        seq, now_ms = self.board.state.seq, self.board.now_ms
        looked, wake_ms = self._turns.looked.get((candidate.queue, candidate.lane), (0, now_ms))
        if wake_ms is None or wake_ms > now_ms:
            self._look_again = self._look_again or looked != seq
            if wake_ms is not None:
                self.out.wait(wake_ms)
            return False
        if self._hunts >= MOST_HUNTS:
            self._passed_over = True
            return False
        self._hunts += 1
        self.hunt.eligible.wake_ms = None
        return True

    def in_vain(self, candidate: Candidate) -> None:
        """The lane looked and found nothing: the others go first next time."""
        self._turns.looked[candidate.queue, candidate.lane] = (self.board.state.seq, self.hunt.eligible.wake_ms)

    def settle(self) -> None:
        """At the end of the pass: who could not look does so soon."""
        if not self._passed_over:
            self._turns.looked.clear()
        if self._passed_over or self._look_again:
            self.out.wait(self.board.now_ms + HUNT_AGAIN_MS)

    def evict(self, job: Job, groups: dict[Group, tuple[PreemptRule, int]]) -> Claim | None:
        """Stop others for the job, and keep for it what that frees."""
        found = self.hunt.evict(job, groups, self.board.usable(job), self.board.state.seq)
        if self.hunt.eligible.wake_ms is not None:
            self.out.wait(self.hunt.eligible.wake_ms)
        if found is None or len(found.victims) > self._left:
            return None
        for victim in found.victims:
            self.out.actions.append(
                Stop(
                    job_id=victim.job.id, attempt=victim.attempt.number, reason="preempted",
                    grace_ms=grace_ms(self.board, victim.job), by=job.id, rule=victim.rule,
                )
            )  # fmt: skip
            self.board.stopping.add(victim.job.id)
        self.hunt.eligible.stopped(found.victims)
        self._left -= len(found.victims)
        self.claims.keep(found.claim)
        return found.claim
