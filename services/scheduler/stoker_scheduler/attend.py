"""What active jobs need: their end decided, a stop ordered, a silent node fenced."""

from __future__ import annotations

from heapq import heappop, heappush

from stoker_proto import Fence, Finish, Requeue, Stop, StopReason, problem

from .board import ENDLESS, Board, Pass, Timing
from .ending import Wait, conclude
from .state import Attempt, Job, State
from .victims import grace_ms

AT_ONCE: tuple[StopReason, ...] = ("peer_failed", "preflight_failed")


class Watch:
    """When each active job needs something, kept from pass to pass: only what changed or is due is looked at.

    A job is replaced whole when anything about it changes; nodes and configuration change the layout. All timers are
    looked at anew when the leader changes.
    """

    def __init__(self) -> None:
        self._state: State | None = None
        self._under: object = None
        self._touches = 0
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def waking(self, board: Board, timing: Timing) -> list[Job]:
        """Jobs to look at now, in the order of their placement."""
        state = board.state
        under = (board.layout.version, state.led_seq, tuple(state.windows.items()), timing)
        if state is not self._state or under != self._under:
            self._state, self._under, self._due, self._heap = state, under, {}, []
            names = set(state.active)
        else:
            names = {job_id for job_id in state.touched_since(self._touches) if job_id in state.active}
            while self._heap and self._heap[0][0] <= board.now_ms:
                due_ms, job_id = heappop(self._heap)
                if self._due.get(job_id) == due_ms and job_id in state.active:
                    names.add(job_id)
        self._touches = state.touches
        jobs = [state.jobs[job_id] for job_id in names]
        return sorted(jobs, key=lambda job: (job.attempt.fence if job.attempt else 0, job.seq))

    def calm(self, job_id: str, until_ms: int) -> None:
        """It needs nothing before, unless it changes."""
        self._due[job_id] = until_ms
        if until_ms < ENDLESS:
            heappush(self._heap, (until_ms, job_id))

    def next_ms(self, state: State) -> int | None:
        """The next moment at which one of them needs something."""
        while self._heap and (
            self._due.get(self._heap[0][1]) != self._heap[0][0] or self._heap[0][1] not in state.active
        ):
            heappop(self._heap)
        if len(self._due) > 2 * len(state.active) + 1000:
            self._due = {job_id: due_ms for job_id, due_ms in self._due.items() if job_id in state.active}
        return self._heap[0][0] if self._heap else None


def attend(board: Board, timing: Timing, out: Pass, watch: Watch) -> None:
    """Look at every active job that changed, or whose time has come."""
    for job in watch.waking(board, timing):
        if job.attempt is not None:
            found = Pass()
            _attend(board, job, job.attempt, timing, found)
            out.actions += found.actions
            # What was decided may turn out void: then it is looked at again.
            again_ms = board.now_ms if found.actions else ENDLESS if found.due_ms is None else found.due_ms
            watch.calm(job.id, again_ms)
            if not found.actions and found.due_ms is not None:
                out.wait(found.due_ms)
    next_ms = watch.next_ms(board.state)
    if next_ms is not None and next_ms > board.now_ms:
        out.wait(next_ms)


def _attend(board: Board, job: Job, attempt: Attempt, timing: Timing, out: Pass) -> None:
    state, now_ms = board.state, board.now_ms
    if attempt.released:
        end = conclude(job, attempt, now_ms, heard_ms=state.led_ms)
        if isinstance(end, Wait):
            out.wait(end.until_ms)
        else:
            out.actions.append(_possible(board, job, end))
        return
    for part in attempt.parts:
        node = state.nodes[part.allocation.node]
        if part.released_ms is None and node.verdict == "unknown":
            # A new leader follows an outage, perhaps: launchers that were cut off by it have all this time from now on.
            certain_ms = max(node.since_ms, state.led_ms) + timing.fence_ms
            if now_ms >= certain_ms:
                out.actions.append(Fence(job_id=job.id, attempt=attempt.number, node=node.name))
            else:
                out.wait(certain_ms)
    if attempt.stop is None:
        reason = _must_stop(board, job, attempt, timing, out)
        if reason is not None:
            grace = 0 if reason in AT_ONCE else grace_ms(board, job)
            out.actions.append(Stop(job_id=job.id, attempt=attempt.number, reason=reason, grace_ms=grace))
            board.stopping.add(job.id)


def _must_stop(board: Board, job: Job, attempt: Attempt, timing: Timing, out: Pass) -> StopReason | None:
    state, now_ms = board.state, board.now_ms
    if job.cancel:
        return "cancelled"
    if attempt.preflight_failed is not None:
        return "preflight_failed"
    if attempt.failed is not None:
        return "peer_failed"
    for part in attempt.parts:
        if part.lost:
            return "lost"
        if part.exited is None and state.nodes[part.allocation.node].verdict == "quarantined":
            return "node_quarantined"
    deadline = state.deadlines.get(job.id)
    if deadline is not None:
        if now_ms >= deadline:
            return "deadline"
        out.wait(deadline)
    if _outside_window(board, job):
        return "window_closed"
    return _in_time(board, job, attempt, timing, out)


def _possible(board: Board, job: Job, end: Finish | Requeue) -> Finish | Requeue:
    """Exclude no nodes when without them there are too few that could ever hold the job: it would just wait."""
    if not isinstance(end, Requeue) or not end.exclude_nodes:
        return end
    avoid = {*end.exclude_nodes, *board.avoided(job)}
    others = sum(node.name not in avoid for node in board.layout.able(job.demand))
    return end if others >= job.demand.nodes else end.model_copy(update={"exclude_nodes": ()})


def _in_time(board: Board, job: Job, attempt: Attempt, timing: Timing, out: Pass) -> StopReason | None:
    began, now_ms = attempt.running_ms, board.now_ms
    if began is None:
        until, reason = max(attempt.placed_ms, board.state.led_ms) + timing.start_deadline_ms, "lost"
    elif job.spec.limits.timeout_minutes is not None:
        until, reason = began + int(job.spec.limits.timeout_minutes * 60_000), "timeout"
    else:
        return None
    if now_ms >= until:
        return "timeout" if reason == "timeout" else "lost"
    out.wait(until)
    return None


def _outside_window(board: Board, job: Job) -> bool:
    """Whether a window that the job belongs to is shut, and shutting it stops what runs."""
    queue = board.tree.queues.get(job.queue)
    names = {job.spec.schedule.window, queue.window if queue else None} - {None}
    for window in board.state.cluster.windows:
        # Not yet told is not shut: what runs goes on until a WindowClosed says so.
        if window.name in names and window.on_close == "preempt" and board.state.windows.get(window.name) is False:
            return True
    return False


def end_waiting(board: Board, out: Pass) -> None:
    """End jobs that wait and may never start: cancelled, late, or waiting for what did not come true."""
    state = board.state
    for job_id in state.ending:
        if out.full:
            return
        job = state.jobs[job_id]
        if job.cancel:
            out.actions.append(Finish(job_id=job_id, state="cancelled", outcome="cancelled"))
        else:
            told = problem("dependency_failed", job.refused)
            out.actions.append(Finish(job_id=job_id, state="failed", outcome="cancelled", problem=told))
    for job_id, deadline in state.deadlines.items():
        if out.full:
            return
        job = state.jobs[job_id]
        if job.state != "queued" or job.cancel or job.refused:
            continue
        if board.now_ms < deadline:
            out.wait(deadline)
            continue
        told = problem("deadline_passed", "The job waited until schedule.deadline was over")
        out.actions.append(Finish(job_id=job_id, state="expired", outcome="timeout", problem=told))
