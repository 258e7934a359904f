"""Who may take GPUs from whom: a higher class inside a queue, and an owner from a queue that has borrowed.

The same rights hold against jobs that run and against GPUs that are kept for jobs that wait.
"""

from __future__ import annotations

from stoker_proto import PreemptRule

from .board import Asked, Board, asked_by
from .quota import borrowed, own_borrowed, own_held, own_nominal
from .state import Claim, Job
from .usage import ALL

Group = tuple[str, str]  # queue and class


class Rights:
    """As a pass needs them: for very many jobs, against few queues."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._paths: dict[str, tuple[str, ...]] = {}
        self._displaced: dict[Asked, dict[Group, tuple[PreemptRule, int]]] = {}
        self._displaced_at = -1
        self._known: list[str] = []
        self._known_at = -1
        self._running: dict[str, list[tuple[str, int]]] = {}
        for queue, name in board.state.running:
            priority = board.tree.classes.get(name)
            if priority is not None and priority.preemptible and queue in board.tree.queues:
                self._running.setdefault(queue, []).append((name, priority.value))

    def displaces(self, job: Job) -> dict[Group, tuple[PreemptRule, int]]:
        """Groups that run and that the job may displace, by which rule, and how far their queue is above its own."""
        if self._displaced_at != self.board.charges:
            self._displaced, self._displaced_at = {}, self.board.charges
        key = asked_by(job)
        found = self._displaced.get(key)
        if found is None:
            found = self._displaced[key] = self._displaces(job)
        return found

    def _displaces(self, job: Job) -> dict[Group, tuple[PreemptRule, int]]:
        found: dict[Group, tuple[PreemptRule, int]] = {}
        own = self.board.class_of(job).value
        for name, value in self._running.get(job.queue, ()):
            if value < own:
                found[job.queue, name] = ("higher_class", 0)
        borrowers = self._borrowers()
        inside = self._inside(job) if borrowers else ()
        for queue in borrowers if any(inside) else ():
            over = self._over(job, queue, inside) if queue != job.queue else 0
            if over > 0:
                found |= {(queue, name): ("reclaim", over) for name, _ in self._running[queue]}
        return found

    def _borrowers(self) -> list[str]:
        """Queues with running jobs that are above a nominal, their own or that of a queue above them."""
        if self._known_at != self.board.charges:
            tree, usage = self.board.tree, self.board.usage
            self._known_at = self.board.charges
            self._known = [
                queue
                for queue in self._running
                if own_borrowed(tree, usage, queue) > 0 or any(borrowed(tree, usage, q) > 0 for q in self._path(queue))
            ]
        return self._known

    def outranked(self, job: Job) -> tuple[Claim, ...]:
        """Claims that only wait for natural ends, of jobs that this one might displace if they ran."""
        board, jobs = self.board, self.board.state.jobs
        waiting = [claim for claim in board.claims.values() if claim.kind == "reserve" and claim.job_id != job.id]
        if not waiting:
            return ()
        own, inside = board.class_of(job).value, self._inside(job)
        nominal = board.tree.bounds[job.queue][ALL].nominal
        owns = nominal is None or board.usage.of(job.queue) + job.milli <= nominal
        yields: dict[str, bool] = {}
        found = []
        for claim in waiting:
            other = jobs[claim.job_id]
            if other.queue == job.queue:
                if board.class_of(other).value < own:
                    found.append(claim)
            elif owns or any(inside):
                if other.queue not in yields:
                    yields[other.queue] = self._yields(job, other.queue, inside, owns)
                if yields[other.queue]:
                    found.append(claim)
        return tuple(found)

    def _yields(self, job: Job, queue: str, inside: tuple[bool, ...], owns: bool) -> bool:
        """Whether what is claimed there is borrowed, and this job borrows nothing."""
        tree = self.board.tree
        if queue not in tree.queues:
            return False
        return (owns and borrowed(tree, self.board.usage, queue) > 0) or self._over(job, queue, inside) > 0

    def _path(self, queue: str) -> tuple[str, ...]:
        """From the top of the tree to the queue."""
        found = self._paths.get(queue)
        if found is None:
            found = self._paths[queue] = tuple(reversed(self.board.usage.path(queue)))
        return found

    def _inside(self, job: Job) -> tuple[bool, ...]:
        """Level by level, and last of all for jobs right in the queue: whether the job has a guarantee and fits in."""
        tree, usage = self.board.tree, self.board.usage
        models = job.demand.models
        asked = (ALL, models[0]) if len(models) == 1 else (ALL,)
        milli = job.milli
        found = []
        for name in (*self._path(job.queue), None):
            guaranteed, fits = False, True
            for model in asked:
                if name is not None:
                    bound = tree.bounds[name].get(model)
                    nominal, used = bound.nominal if bound else None, usage.of(name, model)
                else:
                    nominal, used = own_nominal(tree, job.queue, model), own_held(tree, usage, job.queue, model)
                if nominal is not None:
                    guaranteed, fits = True, fits and used + milli <= nominal
            found.append(guaranteed and fits)
        return tuple(found)

    def _over(self, job: Job, queue: str, inside: tuple[bool, ...]) -> int:
        """How far the other queue is above its nominal, at the level where both queues part; 0: not at all.

        And the job's own queue must stay inside its nominal there, so that nobody can take it back in turn. Where one
        queue is above the other, its own jobs stand for it.
        """
        mine, theirs = self._path(job.queue), self._path(queue)
        level = 0
        while level < min(len(mine), len(theirs)) and mine[level] == theirs[level]:
            level += 1
        if not inside[level]:
            return 0
        tree, usage = self.board.tree, self.board.usage
        over = borrowed(tree, usage, theirs[level]) if level < len(theirs) else own_borrowed(tree, usage, queue)
        return max(0, over)
