"""Who may be preempted in a pass: not whom their class, their count of preemptions or their short run protects."""

from __future__ import annotations

from typing import NamedTuple

from stoker_proto import Allocation, PreemptRule

from .board import Board
from .offers import Victim
from .rights import Group
from .state import Attempt, Job

MS_IN_MINUTE = 60_000
UNTIL_STARTED = 1 << 60
MOST_ON_A_NODE = 10  # candidates looked at on one node, cheapest first


def lost_by(attempt: Attempt, now_ms: int) -> int:
    """GPU time since the last durable checkpoint, or since it started."""
    began = attempt.running_ms if attempt.running_ms is not None else attempt.placed_ms
    since = max(began, attempt.saved_ms or 0)
    return attempt.milli * max(0, now_ms - since)


class _Judged(NamedTuple):
    """Of one queue and class: who may be preempted, what that loses and where it helps; and when there will be more."""

    open: list[tuple[Job, Attempt, int, dict[int, int]]]
    wake_ms: int | None


class Eligible:
    """What a pass learns about active jobs; it serves all preemptors of the pass.

    `coming` is what is on its way back, by row; `wake_ms` the moment from which on there may be more to preempt.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.wake_ms: int | None = None
        self.coming: dict[int, list[Allocation]] = {}
        self._active: dict[Group, list[tuple[Job, Attempt]]] | None = None
        self._judged: dict[Group, _Judged] = {}

    def stopped(self, victims: tuple[Victim, ...]) -> None:
        """These are being stopped from here on: what they hold is coming, and nobody else stops them."""
        for victim in victims:
            for part in victim.attempt.parts:
                if part.released_ms is None:
                    row = self.board.capacity.row(part.allocation.node)
                    self.coming.setdefault(row, []).append(part.allocation)

    def _gather(self) -> None:
        """Active jobs by queue and class, and what is coming back, once for the whole pass."""
        if self._active is not None:
            return
        board, state = self.board, self.board.state
        self._active = {}
        for job_id in state.active:
            job = state.jobs[job_id]
            attempt = job.attempt
            if attempt is None:
                continue
            if board.coming(attempt):
                for part in attempt.parts:
                    if part.released_ms is None:
                        row = board.capacity.row(part.allocation.node)
                        self.coming.setdefault(row, []).append(part.allocation)
            else:
                self._active.setdefault((job.queue, job.class_name), []).append((job, attempt))

    def by_row(self, groups: dict[Group, tuple[PreemptRule, int]]) -> dict[int, list[Victim]]:
        """By row, in the order in which they would go."""
        self._gather()
        found: dict[int, list[Victim]] = {}
        stopping = self.board.stopping
        for group, (rule, over) in groups.items():
            tier = (0 if rule == "reclaim" else 1, self.board.tree.classes[group[1]].value)
            judged = self._judged.get(group)
            if judged is None:
                judged = self._judged[group] = self._judge(group)
            if judged.wake_ms is not None:
                self.wake_ms = judged.wake_ms if self.wake_ms is None else min(self.wake_ms, judged.wake_ms)
            for other, attempt, lost, held in judged.open:
                if other.id not in stopping:
                    key = (*tier, -over, lost, -attempt.placed_ms, other.id)
                    victim = Victim(other, attempt, rule, over, lost, held, tier, key)
                    for row in held:
                        found.setdefault(row, []).append(victim)
        for row, victims in found.items():
            if len(victims) > 1:
                victims.sort(key=key_of)
                found[row] = victims[:MOST_ON_A_NODE]
        return found

    def _judge(self, group: Group) -> _Judged:
        """Whom of a queue and class nothing protects; asked once in a pass, for all that might displace them."""
        assert self._active is not None
        board, row_of = self.board, self.board.capacity.row
        found: list[tuple[Job, Attempt, int, dict[int, int]]] = []
        wake_ms: int | None = None
        for job, attempt in self._active.get(group, ()):
            if job.boosted or job.preemptions >= board.state.cluster.scheduling.max_preemptions:
                continue
            free_from = self._protected_until(job, attempt)
            if free_from <= board.now_ms:
                held: dict[int, int] = {}
                for part in attempt.parts:
                    if part.released_ms is None:
                        row = row_of(part.allocation.node)
                        held[row] = held.get(row, 0) + len(part.allocation.gpus)
                found.append((job, attempt, lost_by(attempt, board.now_ms), held))
            elif free_from < UNTIL_STARTED:
                wake_ms = free_from if wake_ms is None else min(wake_ms, free_from)
        return _Judged(found, wake_ms)

    def _protected_until(self, job: Job, attempt: Attempt) -> int:
        """From when on the job may be preempted, by the log's clock."""
        numbers = self.board.state.cluster.scheduling
        queue = self.board.tree.queues[job.queue]
        minutes = numbers.min_run_minutes if queue.min_run_minutes is None else queue.min_run_minutes
        began = attempt.running_ms
        if began is None:
            # Not running yet: as much is lost as if it had just begun, and its turn to start comes first.
            return attempt.placed_ms if minutes == 0 else UNTIL_STARTED
        until = began + int(minutes * MS_IN_MINUTE)
        if job.spec.outputs.checkpoints is not None and attempt.saved_ms is None:
            until = max(until, began + int(numbers.first_checkpoint_minutes * MS_IN_MINUTE))
        return until


def key_of(victim: Victim) -> tuple[int, int, int, int, int, str]:
    return victim.key
