"""How an attempt that has ended counts: succeeded, tried again, or given up, and why."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_proto import AttemptExited, Finish, Outcome, Problem, Requeue, problem

from .state import Attempt, Job

ATTRIBUTION_WAIT_MS = 30_000
SEAL_WAIT_MS = 60_000
INFRA: tuple[Outcome, ...] = (
    "infra_gpu", "infra_comm", "infra_node", "infra_storage", "lost", "launch_rejected", "sdc_suspect",
)  # fmt: skip
FOLLOWS: tuple[Outcome, ...] = ("infra_gpu", "infra_comm", "infra_node", "infra_storage", "sdc_suspect")
MOST_NODES_BLAMED = 2  # without established evidence; a third node says that it is the job
GENTLE = ("preempted", "window_closed", "cancelled", "deadline", "timeout")
OWN: tuple[Outcome, ...] = ("user_error", "oom", "infra_gpu", "infra_comm", "infra_node", "infra_storage")
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


def conclude(job: Job, attempt: Attempt, now_ms: int, heard_ms: int = 0) -> Finish | Requeue | Wait:
    """What follows from an attempt whose GPUs are all released. What is still to be told has its time from `heard_ms`
    on, when the present leader began: before, perhaps nobody could tell anything.
    """
    ended_ms = max(heard_ms, *(p.released_ms or 0 for p in attempt.parts))
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
        if not told.retry and told.outcome not in job.spec.limits.retries:
            return Finish(job_id=job.id, state="failed", outcome=told.outcome, problem=told.problem)
        refused = (failed.node,) if told.outcome == "launch_rejected" else ()
        return _retry(job, attempt, told.outcome, told.problem, told.exclude_nodes or refused, now_ms)
    return _after_stop(job, attempt, now_ms)


def _after_stop(job: Job, attempt: Attempt, now_ms: int) -> Finish | Requeue:
    lost = tuple(p.allocation.node for p in attempt.parts if p.lost)
    if lost:
        made = problem("node_lost", f"{', '.join(lost)} rebooted or stayed silent while the attempt ran")
        return _retry(job, attempt, "lost", made, lost, now_ms)
    own = _own_end(attempt)
    if own is not None:
        # It failed by itself while it was being stopped: asking it to stop does not excuse that.
        told = attempt.attribution
        detail = own.detail or f"{own.node} reported {own.outcome} while the attempt was being stopped"
        made = told.problem if told else problem(CODE_OF.get(own.outcome, "exit_code"), detail)
        return _retry(job, attempt, own.outcome, made, (own.node,) if own.outcome in INFRA else (), now_ms)
    if attempt.stop == "timeout":
        limit = job.spec.limits.timeout_minutes
        made = problem("timeout", f"The attempt ran longer than limits.timeout_minutes = {limit}")
        return Finish(job_id=job.id, state="expired", outcome="timeout", problem=made)
    if attempt.stop == "deadline":
        made = problem("deadline_passed", "The attempt was running when schedule.deadline was over")
        return Finish(job_id=job.id, state="expired", outcome="timeout", problem=made)
    if attempt.stop == "preflight_failed":
        bad = attempt.preflight_failed or ()
        cause = f"preflight failed on {', '.join(bad)}" if bad else "preflight failed, no node could be named"
        return _free_retry(job, attempt, "preflight_failed", cause, bad, now_ms + backoff_ms(attempt.number - 1))
    if attempt.stop == "preempted":
        return _free_retry(job, attempt, "preempted", preempted_by(attempt), (), 0)
    if attempt.stop == "window_closed":
        return _free_retry(job, attempt, "preempted", "its window was shut", (), 0)
    if attempt.stop == "node_quarantined":
        nodes = tuple(p.allocation.node for p in attempt.parts if p.exited and p.exited.asked == "node_quarantined")
        made = problem("gpu_fault", f"{_named(attempt)} was quarantined while the attempt ran")
        return _retry(job, attempt, "infra_gpu", made, nodes if len(nodes) == 1 else (), now_ms)
    made = problem("launch_rejected", f"The attempt did not start in time ({attempt.stop or 'no report'})")
    return _retry(job, attempt, "launch_rejected", made, attempt.silent, now_ms)


def preempted_by(attempt: Attempt) -> str:
    """Who took the GPUs, and by which rule."""
    rule = {
        "higher_class": "a higher class in the same queue",
        "reclaim": "a queue within its nominal takes back what this one borrowed",
    }.get(attempt.rule or "", "the scheduler's rules")
    return f"preempted for {attempt.by}: {rule}" if attempt.by else "preempted"


def _named(attempt: Attempt) -> str:
    nodes = [p.allocation.node for p in attempt.parts]
    return f"A node of the gang ({', '.join(nodes)})" if len(nodes) > 1 else nodes[0]


def _own_end(attempt: Attempt) -> AttemptExited | None:
    """A part that was asked to stop, and failed for a reason of its own."""
    for part in attempt.parts:
        if part.exited and part.exited.asked in GENTLE and part.exited.outcome in OWN:
            return part.exited
    return None


def _complete(attempt: Attempt) -> bool:
    return all(p.sealed or p.lost or p.started_ms is None for p in attempt.parts)


def _retry(
    job: Job, attempt: Attempt, outcome: Outcome, made: Problem, exclude: tuple[str, ...], now_ms: int
) -> Finish | Requeue:
    """Try again while the budget for this outcome lasts; a fault that follows the job to other nodes is the job's."""
    limits, retried = job.spec.limits, dict(job.retried)
    special = dict(limits.retries)
    if outcome in special:
        spent, allowed, name = retried.get(outcome, 0), special[outcome], f"limits.retries.{outcome}"
    elif outcome in INFRA:
        spent = sum(count for which, count in retried.items() if which not in special)
        allowed, name = limits.max_retries, "limits.max_retries"
    else:
        return Finish(job_id=job.id, state="failed", outcome=outcome, problem=made)
    before = {node for which, node in job.blamed if which == outcome}
    told = attempt.attribution
    seen = before | set(exclude)
    proven = told is not None and told.confidence == "established"
    if outcome in FOLLOWS and not proven and len(seen) > max(len(before), MOST_NODES_BLAMED):
        again = f"{made.detail}; it failed the same way on {', '.join(sorted(seen))}: it is likely the job"
        suspect = made.model_copy(update={"detail": again, "retryable": False})
        return Finish(job_id=job.id, state="failed", outcome=outcome, problem=suspect)
    if spent >= allowed:
        used_up = made.model_copy(update={"detail": f"{made.detail}; {name} = {allowed} is used up"})
        return Finish(job_id=job.id, state="failed", outcome=outcome, problem=used_up)
    return Requeue(
        job_id=job.id,
        attempt=attempt.number,
        outcome=outcome,
        cause=made.detail,
        charged=True,
        exclude_nodes=exclude,
        not_before_ms=now_ms + backoff_ms(spent),
    )


def _free_retry(
    job: Job, attempt: Attempt, outcome: Outcome, cause: str, exclude: tuple[str, ...], not_before_ms: int
) -> Requeue:
    return Requeue(
        job_id=job.id,
        attempt=attempt.number,
        outcome=outcome,
        cause=cause,
        charged=False,
        exclude_nodes=exclude,
        not_before_ms=not_before_ms,
    )
