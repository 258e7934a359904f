"""What a decision does when it lands: each action's preconditions are checked again, and what no longer holds is void.

That one rule settles every race between deciding and landing (cancel, quarantine, a node that rebooted): the action
does nothing, whole gangs together, and the next pass decides anew.
"""

from __future__ import annotations

from stoker_proto import (
    AttemptPlaced,
    DecisionBatch,
    Event,
    Fence,
    Finish,
    JobFinished,
    JobRequeued,
    Place,
    Recorded,
    Requeue,
    Stop,
)

from .state import Attempt, Exclusion, Part, State

EXCLUSION_MS = 10 * 60_000


def announcement_key(event: AttemptPlaced | JobRequeued | JobFinished) -> str:
    """Which announcement this is; also its event id, so that two leaders announce once."""
    if isinstance(event, AttemptPlaced):
        return f"placed:{event.job_id}:{event.attempt}"
    if isinstance(event, JobRequeued):
        return f"requeued:{event.job_id}:{event.attempt}"
    return f"finished:{event.job_id}"


def apply_batch(state: State, batch: DecisionBatch, recorded: Recorded) -> None:
    for action in batch.actions:
        held = False
        match action:
            case Place():
                held = _place(state, action, recorded)
            case Stop():
                held = _stop(state, action, recorded)
            case Requeue():
                held = _requeue(state, action, recorded)
            case Finish():
                held = _finish(state, action)
            case Fence():
                held = _fence(state, action, recorded)
        state.voided += not held


def _announce(state: State, event: AttemptPlaced | JobRequeued | JobFinished) -> None:
    state.to_announce[announcement_key(event)] = event


def _place(state: State, action: Place, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    if job is None or job.state != "queued" or job.cancel or action.attempt != job.attempts + 1:
        return False
    for allocation in action.allocations:
        node = state.nodes.get(allocation.node)
        if node is None or not node.takes_work or node.boot_epoch != allocation.boot_epoch:
            return False
        if not set(allocation.gpus) <= set(state.free(node)):
            return False
    for allocation in action.allocations:
        held = state.owner[allocation.node]
        for uuid in allocation.gpus:
            held[uuid] = (job.id, action.attempt)
    attempt = Attempt(
        number=action.attempt,
        fence=recorded.seq,
        placed_ms=recorded.at_ms,
        parts=tuple(Part(a) for a in action.allocations),
        preflight=action.preflight,
    )
    state.change(job.id, state="active", attempt=attempt, attempts=action.attempt, reasons=())
    del state.queued[job.id]
    state.active[job.id] = None
    _announce(
        state,
        AttemptPlaced(
            job_id=job.id,
            attempt=action.attempt,
            fence=recorded.seq,
            allocations=action.allocations,
            preflight=action.preflight,
        ),
    )
    return True


def _stop(state: State, action: Stop, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    attempt = job.attempt if job else None
    if attempt is None or attempt.number != action.attempt or attempt.stop is not None or attempt.released:
        return False
    state.change(
        action.job_id,
        attempt=attempt._replace(stop=action.reason, stop_ms=recorded.at_ms, grace_ms=action.grace_ms),
    )
    return True


def _requeue(state: State, action: Requeue, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    attempt = job.attempt if job else None
    if job is None or attempt is None or attempt.number != action.attempt or not attempt.released or job.cancel:
        return False
    excluded = {e.node: e for e in job.exclusions}
    for node in action.exclude_nodes:
        excluded[node] = Exclusion(node, recorded.seq, recorded.at_ms + EXCLUSION_MS)
    state.change(
        job.id,
        state="queued",
        attempt=None,
        retries=job.retries + action.charged,
        exclusions=tuple(excluded.values()),
        not_before_ms=action.not_before_ms,
    )
    del state.active[job.id]
    state.queued[job.id] = None
    _announce(
        state,
        JobRequeued(
            job_id=job.id,
            attempt=action.attempt,
            outcome=action.outcome,
            cause=action.cause,
            exclude_nodes=action.exclude_nodes,
            not_before_ms=action.not_before_ms,
        ),
    )
    return True


def _finish(state: State, action: Finish) -> bool:
    job = state.jobs.get(action.job_id)
    if job is None or job.state not in ("queued", "active") or (job.attempt and not job.attempt.released):
        return False
    state.change(job.id, state=action.state, attempt=None, outcome=action.outcome, problem=action.problem, reasons=())
    state.queued.pop(job.id, None)
    state.active.pop(job.id, None)
    _announce(
        state,
        JobFinished(
            job_id=job.id,
            state=action.state,
            outcome=action.outcome,
            attempts=job.attempts,
            gpu_ms=job.gpu_ms,
            problem=action.problem,
        ),
    )
    return True


def _fence(state: State, action: Fence, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    attempt = job.attempt if job else None
    node = state.nodes.get(action.node)
    if attempt is None or attempt.number != action.attempt or node is None or node.verdict != "unknown":
        return False
    return release_part(state, action.job_id, action.node, recorded.at_ms, lost=True)


def release_part(state: State, job_id: str, node: str, at_ms: int, *, lost: bool) -> bool:
    """Give back the GPUs that the job's attempt holds on this node, and charge for them."""
    job = state.jobs[job_id]
    attempt = job.attempt
    if attempt is None:
        return False
    part = next((p for p in attempt.parts if p.allocation.node == node and p.released_ms is None), None)
    if part is None:
        return False
    for uuid in part.allocation.gpus:
        state.owner[node].pop(uuid, None)
    gpu_ms = len(part.allocation.gpus) * max(0, at_ms - attempt.placed_ms)
    done = part._replace(released_ms=at_ms, lost=lost)
    parts = tuple(done if p is part else p for p in attempt.parts)
    state.change(job_id, attempt=attempt._replace(parts=parts), gpu_ms=job.gpu_ms + gpu_ms)
    return True


def announcements(state: State) -> list[tuple[str, Event]]:
    """What held and is not yet told, as (event id, event)."""
    return list(state.to_announce.items())
