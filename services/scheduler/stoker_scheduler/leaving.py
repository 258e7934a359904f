"""How a job leaves its GPUs when that decision lands: back to the queue, for good, or fenced; and its charge."""

from __future__ import annotations

from stoker_proto import Fence, Finish, JobBoosted, JobFinished, JobRequeued, Recorded, Requeue

from .announce import announce
from .fragments import WHOLE
from .queueing import dequeue, drop_claim, enqueue, is_firm, settle_dependents
from .state import Exclusion, Job, Over, State, changed

EXCLUSION_MS = 10 * 60_000
MS_IN_HOUR = 3_600_000


def requeue(state: State, action: Requeue, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    attempt = job.attempt if job else None
    if job is None or attempt is None or attempt.number != action.attempt or not attempt.released or job.cancel:
        return False
    excluded = {e.node: e for e in job.exclusions if e.until_ms > recorded.at_ms}
    for node in action.exclude_nodes:
        excluded[node] = Exclusion(node, recorded.seq, recorded.at_ms + EXCLUSION_MS)
    retried, blamed = dict(job.retried), dict.fromkeys(job.blamed)
    if action.charged:
        retried[action.outcome] = retried.get(action.outcome, 0) + 1
        told = attempt.attribution
        if told is None or told.confidence != "established":
            blamed.update(dict.fromkeys((action.outcome, node) for node in action.exclude_nodes))
    _leave(state, job)
    spent = job.preemptions >= state.cluster.scheduling.max_preemptions and not job.boosted
    job = state.change(
        job.id,
        state="queued",
        boosted=job.boosted or spent,
        attempt=None,
        since_ms=recorded.at_ms,
        retried=tuple(retried.items()),
        blamed=tuple(blamed),
        exclusions=tuple(excluded.values()),
        not_before_ms=action.not_before_ms,
    )
    enqueue(state, job)
    announce(
        state,
        JobRequeued(
            job_id=job.id, attempt=action.attempt, outcome=action.outcome, cause=action.cause,
            exclude_nodes=action.exclude_nodes, not_before_ms=action.not_before_ms,
        ),
    )  # fmt: skip
    if spent:
        announce(state, JobBoosted(job_id=job.id, cause="preempted"))
    return True


def _leave(state: State, job: Job) -> None:
    """The job is not active any more."""
    if job.id not in state.active:
        return
    del state.active[job.id]
    state.usage.count(job.queue, -1)
    kind = (job.queue, job.class_name)
    state.running[kind] -= 1
    if not state.running[kind]:
        del state.running[kind]
    if job.array_id:
        state.arrays[job.array_id] -= 1
        if not state.arrays[job.array_id]:
            del state.arrays[job.array_id]


def finish(state: State, action: Finish) -> bool:
    job = state.jobs.get(action.job_id)
    if job is None or (job.attempt and not job.attempt.released):
        return False
    over = OVER.setdefault((action.state, action.outcome), Over(action.state, action.outcome))
    drop_claim(state, job.id)
    dequeue(state, job.id)
    _leave(state, job)
    state.drop(job.id)
    state.deadlines.pop(job.id, None)
    state.over[job.id] = over
    settle_dependents(state, job.id, over)
    announce(
        state,
        JobFinished(
            job_id=job.id, state=action.state, outcome=action.outcome, attempts=job.attempts, gpu_ms=job.gpu_ms,
            problem=action.problem,
        ),
    )  # fmt: skip
    return True


OVER: dict[tuple[str, str], Over] = {}  # one value for all jobs that ended alike: there may be millions


def fence(state: State, action: Fence, recorded: Recorded) -> bool:
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
    allocation = part.allocation
    owner, at = state.owner[node], state.at[node]
    for uuid in allocation.gpus:
        held = owner[uuid]
        del held[job_id]
        if not held:
            del owner[uuid]
    state.capacity.give(
        node, [at[u] for u in allocation.gpus], allocation.milli, allocation.cpu_milli, allocation.memory_mib
    )
    state.usage.add(job.queue, part.charge, firm=is_firm(state, job), sign=-1)
    lasted_ms = max(0, at_ms - attempt.placed_ms)
    numbers = state.cluster.scheduling
    counted_ms = max(lasted_ms, int(numbers.shortest_charge_seconds * 1000))
    state.usage.spent(job.queue, part.milli * counted_ms, at_ms, int(numbers.half_life_hours * MS_IN_HOUR))
    done = changed(part, released_ms=at_ms, lost=lost)
    parts = tuple(done if p is part else p for p in attempt.parts)
    state.change(job_id, attempt=changed(attempt, parts=parts), gpu_ms=job.gpu_ms + part.milli * lasted_ms // WHOLE)
    return True
