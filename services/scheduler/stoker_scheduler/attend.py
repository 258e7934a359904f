"""What active jobs need: their end decided, a stop ordered, a silent node fenced."""

from __future__ import annotations

from stoker_proto import Fence, Finish, Requeue, Stop, StopReason, problem

from .board import ENDLESS, Board, Pass, Timing
from .ending import Wait, conclude
from .explain import whole
from .state import Attempt, Job
from .victims import grace_ms

AT_ONCE: tuple[StopReason, ...] = ("peer_failed", "preflight_failed")


class Watch:
    """Active jobs that need nothing before their time, kept from pass to pass: only what has changed is looked at.

    A job is replaced whole when anything about it changes; nodes and configuration change the layout.
    """

    def __init__(self) -> None:
        self._calm: dict[str, tuple[Job, int]] = {}
        self._under: object = None

    def calm(self, board: Board, timing: Timing) -> dict[str, tuple[Job, int]]:
        """By job: as it was when it was looked at, and until when it needs nothing."""
        under = (board.layout.version, tuple(board.state.windows.items()), timing)
        if under != self._under:
            self._under, self._calm = under, {}
        active = board.state.active
        if len(self._calm) > 2 * len(active) + 1000:
            self._calm = {job_id: seen for job_id, seen in self._calm.items() if job_id in active}
        return self._calm


def attend(board: Board, timing: Timing, out: Pass, watch: Watch) -> None:
    """Look at every active job that changed, or whose time has come."""
    jobs, now_ms, calm = board.state.jobs, board.now_ms, watch.calm(board, timing)
    due_ms = ENDLESS
    for job_id in board.state.active:
        if out.full:
            break
        job = jobs[job_id]
        seen = calm.get(job_id)
        if seen is not None and seen[0] is job and seen[1] > now_ms:
            if seen[1] < due_ms:
                due_ms = seen[1]
        elif job.attempt is not None:
            found = Pass()
            _attend(board, job, job.attempt, timing, found)
            out.actions += found.actions
            until_ms = ENDLESS if found.due_ms is None else found.due_ms
            due_ms = min(due_ms, until_ms)
            if not found.actions:
                calm[job_id] = (job, until_ms)
    if due_ms < ENDLESS:
        out.wait(due_ms)


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
    others = sum(whole(node, job) and node.name not in avoid for node in board.state.nodes.values())
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
