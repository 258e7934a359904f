"""What active jobs need: their end decided, a stop ordered, a silent node fenced."""

from __future__ import annotations

from stoker_proto import Fence, Finish, Stop, StopReason, problem

from .board import Board, Pass, Timing
from .ending import Wait, conclude
from .state import Attempt, Job
from .victims import grace_ms

AT_ONCE: tuple[StopReason, ...] = ("peer_failed", "preflight_failed")


def attend(board: Board, timing: Timing, out: Pass) -> None:
    """Look at every active job."""
    state = board.state
    for job_id in state.active:
        job = state.jobs[job_id]
        if job.attempt is not None:
            _attend(board, job, job.attempt, timing, out)


def _attend(board: Board, job: Job, attempt: Attempt, timing: Timing, out: Pass) -> None:
    state, now_ms = board.state, board.now_ms
    if attempt.released:
        end = conclude(job, attempt, now_ms)
        if isinstance(end, Wait):
            out.wait(end.until_ms)
        else:
            out.actions.append(end)
        return
    for part in attempt.parts:
        node = state.nodes[part.allocation.node]
        if part.released_ms is None and node.verdict == "unknown":
            if now_ms >= node.since_ms + timing.fence_ms:
                out.actions.append(Fence(job_id=job.id, attempt=attempt.number, node=node.name))
            else:
                out.wait(node.since_ms + timing.fence_ms)
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
    return _in_time(job, attempt, timing, now_ms, out)


def _in_time(job: Job, attempt: Attempt, timing: Timing, now_ms: int, out: Pass) -> StopReason | None:
    began = attempt.running_ms
    if began is None:
        until, reason = attempt.placed_ms + timing.start_deadline_ms, "lost"
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
        if window.name in names and window.on_close == "preempt" and not board.state.windows.get(window.name, False):
            return True
    return False


def end_waiting(board: Board, out: Pass) -> None:
    """End jobs that wait and may never start: cancelled, late, or waiting for what did not come true."""
    state = board.state
    for job_id in state.ending:
        job = state.jobs[job_id]
        if job.cancel:
            out.actions.append(Finish(job_id=job_id, state="cancelled", outcome="cancelled"))
        else:
            told = problem("dependency_failed", job.refused)
            out.actions.append(Finish(job_id=job_id, state="failed", outcome="cancelled", problem=told))
    for job_id, deadline in state.deadlines.items():
        job = state.jobs[job_id]
        if job.state != "queued" or job.cancel or job.refused:
            continue
        if board.now_ms < deadline:
            out.wait(deadline)
            continue
        told = problem("deadline_passed", "The job waited until schedule.deadline was over")
        out.actions.append(Finish(job_id=job_id, state="expired", outcome="timeout", problem=told))
