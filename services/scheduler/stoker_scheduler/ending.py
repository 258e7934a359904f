"""How an attempt that has ended counts: succeeded, tried again, or given up, and why."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_proto import Finish, Outcome, Problem, Requeue, problem

from .state import Attempt, Job

ATTRIBUTION_WAIT_MS = 30_000
SEAL_WAIT_MS = 60_000
INFRA: tuple[Outcome, ...] = (
    "infra_gpu", "infra_comm", "infra_node", "infra_storage", "lost", "launch_rejected", "sdc_suspect",
)  # fmt: skip
CODE_OF: dict[Outcome, str] = {
    "infra_gpu": "gpu_fault",
    "infra_comm": "comm_fault",
    "infra_node": "node_lost",
    "infra_storage": "storage_fault",
    "lost": "node_lost",
    "launch_rejected": "launch_rejected",
    "preflight_failed": "preflight_failed",
    "user_error": "exit_code",
    "oom": "host_oom",
    "timeout": "timeout",
    "cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """The end is not known yet; look again at `until_ms` at the latest."""

    until_ms: int


def backoff_ms(retries: int) -> int:
    """The first retry starts at once; then 2, 4, ... up to 60 seconds."""
    return 0 if retries == 0 else min(60_000, 1000 * 2**retries)


def conclude(job: Job, attempt: Attempt, now_ms: int) -> Finish | Requeue | Wait:
    """What follows from an attempt whose GPUs are all released."""
    ended_ms = max(p.released_ms or 0 for p in attempt.parts)
    if not _complete(attempt) and now_ms < ended_ms + SEAL_WAIT_MS:
        return Wait(ended_ms + SEAL_WAIT_MS)
    if all(p.exited and p.exited.outcome == "ok" for p in attempt.parts):
        return Finish(job_id=job.id, state="succeeded", outcome="ok")
    if job.cancel:
        made = problem("cancelled", "The job was cancelled while an attempt was active")
        return Finish(job_id=job.id, state="cancelled", outcome="cancelled", problem=made)
    failed = attempt.failed
    if failed is not None:
        told = attempt.attribution
        if told is None:
            if now_ms < ended_ms + ATTRIBUTION_WAIT_MS:
                return Wait(ended_ms + ATTRIBUTION_WAIT_MS)
            detail = failed.detail or f"{failed.node} reported {failed.outcome}"
            made = problem(CODE_OF.get(failed.outcome, "exit_code"), detail)
            return _retry(job, attempt, failed.outcome, made, (failed.node,), now_ms)
        if not told.retry:
            return Finish(job_id=job.id, state="failed", outcome=told.outcome, problem=told.problem)
        return _retry(job, attempt, told.outcome, told.problem, told.exclude_nodes, now_ms)
    return _after_stop(job, attempt, now_ms)


def _after_stop(job: Job, attempt: Attempt, now_ms: int) -> Finish | Requeue:
    lost = tuple(p.allocation.node for p in attempt.parts if p.lost)
    if lost:
        made = problem("node_lost", f"{', '.join(lost)} rebooted or stayed silent while the attempt ran")
        return _retry(job, attempt, "lost", made, lost, now_ms)
    if attempt.stop == "timeout":
        limit = job.spec.limits.timeout_minutes
        made = problem("timeout", f"The attempt ran longer than limits.timeout_minutes = {limit}")
        return Finish(job_id=job.id, state="expired", outcome="timeout", problem=made)
    if attempt.stop == "preflight_failed":
        bad = attempt.preflight_failed or ()
        cause = f"preflight failed on {', '.join(bad)}" if bad else "preflight failed, no node could be named"
        return _free_retry(job, attempt, "preflight_failed", cause, bad, now_ms)
    if attempt.stop == "preempted":
        return _free_retry(job, attempt, "preempted", "preempted", (), now_ms)
    if attempt.stop == "node_quarantined":
        nodes = tuple(p.allocation.node for p in attempt.parts if p.exited and p.exited.asked == "node_quarantined")
        made = problem("gpu_fault", "A node of the gang was quarantined while the attempt ran")
        return _retry(job, attempt, "infra_gpu", made, nodes if len(nodes) == 1 else (), now_ms)
    made = problem("launch_rejected", f"The attempt did not start in time ({attempt.stop or 'no report'})")
    return _retry(job, attempt, "launch_rejected", made, (), now_ms)


def _complete(attempt: Attempt) -> bool:
    return all(p.sealed or p.lost or p.started_ms is None for p in attempt.parts)


def _retry(
    job: Job, attempt: Attempt, outcome: Outcome, made: Problem, exclude: tuple[str, ...], now_ms: int
) -> Finish | Requeue:
    if outcome not in INFRA:
        return Finish(job_id=job.id, state="failed", outcome=outcome, problem=made)
    if job.retries >= job.spec.limits.max_retries:
        spent = made.model_copy(
            update={"detail": f"{made.detail}; limits.max_retries = {job.spec.limits.max_retries} is used up"}
        )
        return Finish(job_id=job.id, state="failed", outcome=outcome, problem=spent)
    return Requeue(
        job_id=job.id,
        attempt=attempt.number,
        outcome=outcome,
        cause=made.detail,
        charged=True,
        exclude_nodes=exclude,
        not_before_ms=now_ms + backoff_ms(job.retries),
    )


def _free_retry(
    job: Job, attempt: Attempt, outcome: Outcome, cause: str, exclude: tuple[str, ...], now_ms: int
) -> Requeue:
    return Requeue(
        job_id=job.id,
        attempt=attempt.number,
        outcome=outcome,
        cause=cause,
        charged=False,
        exclude_nodes=exclude,
        not_before_ms=now_ms + backoff_ms(attempt.number - 1),
    )
