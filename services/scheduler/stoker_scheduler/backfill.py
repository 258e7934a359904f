"""Backfill: jobs on GPUs that are kept for others, when they will be gone before those can start."""

from __future__ import annotations

from .board import ENDLESS, Board, Pass
from .order import Candidate, Walk
from .reserve import gone_by
from .starts import Starts
from .state import Job

LOOK_BEHIND = 64  # jobs behind a blocked one of their lane that may fit in before a claim starts


class Backfill:
    """Who fits in before whose claim."""

    def __init__(self, board: Board, out: Pass, starts: Starts, walk: Walk) -> None:
        self.board = board
        self.out = out
        self.starts = starts
        self.walk = walk
        self._free_kept: dict[int, tuple[bool, int]] = {}

    def fill(self, job: Job) -> bool:
        """Start the job over claims that start after its end."""
        board = self.board
        ends = gone_by(board, job)
        if ends >= ENDLESS or job.not_before_ms > board.now_ms or job.gated or self.out.full:
            return False
        over = tuple(
            claim.job_id
            for claim in board.claims.values()
            if claim.kind == "reserve" and claim.starts_ms is not None and claim.starts_ms >= ends
        )
        if not over or not board.has_free(over, job):
            return False
        models, _ = board.allowed(job)
        if models is None:
            return False
        claims = [board.claims[job_id] for job_id in over]
        for job_id in over:
            board.open(job_id)
        spots = self.starts.spots(job, models)
        chosen = self.starts.allocated(job, spots) if spots is not None else ()
        if chosen:
            board.take(job, chosen)
        for claim in claims:
            board.keep(claim)
        if chosen:
            self.starts.start(job, chosen, over)
        return bool(chosen)

    def fill_behind(self, candidate: Candidate) -> None:
        """Of a lane whose first job is blocked, those that will be gone soon may fit in before a claim starts."""
        if not self._keeps_free(candidate.job):
            return
        tried_ms = ENDLESS  # one of the lane that would be gone by then found no place: one that stays longer won't
        for key in self.walk.behind(candidate, LOOK_BEHIND):
            other = self.board.state.jobs[key[3]]
            ends_ms = gone_by(self.board, other)
            if ends_ms < tried_ms and other.id not in self.board.claims and not self.fill(other):
                tried_ms = ends_ms

    def _keeps_free(self, job: Job) -> bool:
        """Whether claims that start at a known time keep GPUs that are free now and large enough a part for the job."""
        known, at = self._free_kept.get(job.demand.milli, (False, -1))
        if at != self.board.charges:
            over = tuple(
                c.job_id for c in self.board.claims.values() if c.kind == "reserve" and c.starts_ms is not None
            )
            known = self.board.has_free(over, job)
            self._free_kept[job.demand.milli] = (known, self.board.charges)
        return known
