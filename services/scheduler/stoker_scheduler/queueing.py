"""Getting into the queue and out of it: a waiting job stands in one lane, or is gated, and nowhere else."""

from __future__ import annotations

from stoker_proto import After, Cluster, JobSpec

from .placement import Demand
from .state import Job, Over, State
from .usage import Usage
from .waiting import Lane, Place

MIB_IN_GIB = 1024


def demand_of(spec: JobSpec) -> Demand:
    """What each node of the job's gang must give."""
    compute = spec.compute
    return Demand(
        gpus=compute.per_node,
        milli=compute.milli,
        cpu=round(compute.cpus_per_node * 1000),
        memory=round(compute.memory_gib_per_node * MIB_IN_GIB),
        models=compute.models,
        nodes=compute.nodes,
    )


def lane_of(job: Job) -> Lane:
    spec = job.spec
    limited = spec.array is not None and spec.array.at_once is not None
    return Lane(
        priority_class=job.class_name,
        demand=job.demand,
        within=spec.compute.within,
        window=spec.schedule.window,
        array_id=job.array_id if limited else None,
        avoid=job.exclusions,
    )


def enqueue(state: State, job: Job) -> None:
    """Put a queued job where it belongs."""
    if not job.reasons:
        state.untold[job.id] = None
    if job.gated:
        ends = job.cancel or job.refused
        (state.ending if ends else state.gated)[job.id] = None
        drop_claim(state, job.id)
    else:
        key = (not job.boosted, -job.priority, job.seq, job.id)
        state.waiting.add(job.id, Place(job.queue, lane_of(job), key))


def dequeue(state: State, job_id: str) -> None:
    state.waiting.remove(job_id)
    state.gated.pop(job_id, None)
    state.ending.pop(job_id, None)
    state.untold.pop(job_id, None)


def drop_claim(state: State, job_id: str) -> bool:
    """Give up what is kept for the job."""
    claim = state.claims.pop(job_id, None)
    if claim is None:
        return False
    for allocation in claim.allocations:
        for uuid in allocation.gpus:
            state.claimed.pop((allocation.node, uuid), None)
    return True


GATES = frozenset(("held", "waits_for", "refused", "cancel"))


def requeue_with(state: State, job_id: str, **fields: object) -> None:
    """Change a job; when it waits, where it waits follows, and why is told anew when a gate opens or shuts."""
    if not GATES.isdisjoint(fields):
        fields["reasons"] = ()
    job = state.change(job_id, **fields)
    if job.state == "queued":
        dequeue(state, job_id)
        enqueue(state, job)


def first_gates(state: State, job_id: str, spec: JobSpec) -> tuple[tuple[str, ...], str]:
    """Jobs that a new job must wait for, and why it can never start, if so."""
    waits: list[str] = []
    refused = ""
    for after in spec.schedule.after:
        over = state.over.get(after.job)
        if over is not None:
            refused = refused or _refusal(after, over)
        elif after.job in state.jobs:
            waits.append(after.job)
            state.dependents[after.job] = (*state.dependents.get(after.job, ()), job_id)
        else:
            refused = refused or f"There is no job {after.job}, which this one is to wait for"
    return tuple(waits), refused


def _refusal(after: After, over: Over) -> str:
    succeeded = over.state == "succeeded"
    if after.on == "end" or succeeded == (after.on == "success"):
        return ""
    return f"{after.job} ended as {over.state}; this job was to run only on its {after.on}"


def settle_dependents(state: State, job_id: str, over: Over) -> None:
    """Tell the jobs that waited for this one that it is over."""
    for waiter in state.dependents.pop(job_id, ()):
        job = state.jobs.get(waiter)
        if job is None:
            continue
        after = next(a for a in job.spec.schedule.after if a.job == job_id)
        left = tuple(w for w in job.waits_for if w != job_id)
        refused = job.refused or _refusal(after, over)
        requeue_with(state, waiter, waits_for=left, refused=refused, since_ms=state.at_ms)


def configure(state: State, version: int, cluster: Cluster) -> None:
    """Share the cluster by another configuration from here on."""
    _tell_strangers(state, state.cluster, cluster)
    state.version, state.cluster = version, cluster
    state.layout += 1
    names = {window.name for window in cluster.windows}
    state.windows = {name: opened for name, opened in state.windows.items() if name in names}
    past, state.usage = state.usage.past, Usage({q.name: q.parent for q in cluster.queues})
    state.usage.past = past
    for job_id in state.active:
        job = state.jobs[job_id]
        state.usage.count(job.queue, 1)
        for part in job.attempt.parts if job.attempt else ():
            if part.released_ms is None:
                state.usage.add(job.queue, part.charge, firm=is_firm(state, job))


def _tell_strangers(state: State, before: Cluster, after: Cluster) -> None:
    """Jobs whose queue or class went away, or came back, are told anew why they wait."""
    changed = {q.name for q in before.queues} ^ {q.name for q in after.queues}
    classes = {c.name for c in before.classes} ^ {c.name for c in after.classes}
    for queue, lanes in state.waiting.queues.items():
        for lane, keys in lanes.items():
            if queue in changed or lane.priority_class in classes:
                for key in keys:
                    state.change(key[3], reasons=())
                    state.untold[key[3]] = None


def is_firm(state: State, job: Job) -> bool:
    """Whether the job's class may not be preempted."""
    for priority in state.cluster.classes:
        if priority.name == job.class_name:
            return not priority.preemptible
    return False
