"""What a decision does when it lands: each action's preconditions are checked again, and what no longer holds is void.

That one rule settles every race between deciding and landing (cancel, quarantine, a node that rebooted): the action
does nothing, whole gangs together, and the next pass decides anew.
"""

from __future__ import annotations

from stoker_proto import (
    Allocation,
    AttemptPlaced,
    Boost,
    Claim,
    DecisionBatch,
    JobBoosted,
    Place,
    Recorded,
    Stop,
)

from . import state as entities
from .announce import announce
from .ending import INFRA
from .fragments import WHOLE
from .leaving import fence, finish, requeue
from .queueing import dequeue, drop_claim, is_firm, requeue_with
from .state import Attempt, Job, Part, State, changed

REMEMBERED_MS = 60_000
REJOIN_MS = 5 * 60_000  # in which a gang that lost a node finds the other nodes free
NOT_ITS_OWN = ("node_quarantined", "preflight_failed", "lost")


def apply_batch(state: State, batch: DecisionBatch, recorded: Recorded) -> None:
    claims = {action.job_id: action for action in batch.actions if action.action == "claim"}
    for action in batch.actions:
        # By name and not by class: this runs for every action that ever was, and pydantic's classes answer slowly.
        if action.action == "place":
            held = _place(state, action, recorded)
        elif action.action == "stop":
            # Nobody gives way for a job that cannot have the GPUs any more.
            vain = action.by in claims and not _claimable(state, claims[action.by])
            held = not vain and _stop(state, action, recorded)
        elif action.action == "requeue":
            held = requeue(state, action, recorded)
        elif action.action == "finish":
            held = finish(state, action)
        elif action.action == "fence":
            held = fence(state, action, recorded)
        elif action.action == "claim":
            held = _claim(state, action, recorded)
        elif action.action == "unclaim":
            held = drop_claim(state, action.job_id)
        else:
            held = _boost(state, action)
        state.voided += not held


def _startable(state: State, job: Job | None) -> bool:
    return job is not None and job.state == "queued" and not job.gated


def _working(state: State, allocation: Allocation) -> bool:
    node = state.nodes.get(allocation.node)
    return node is not None and node.takes_work and node.boot_epoch == allocation.boot_epoch


def _as_asked(job: Job, allocations: tuple[Allocation, ...]) -> bool:
    """Whether this is the whole gang, each of its nodes once and with what the job asks for."""
    demand = job.demand
    if not len({a.node for a in allocations}) == len(allocations) == demand.nodes:
        return False
    for allocation in allocations:
        if len(allocation.gpus) != demand.gpus or allocation.milli != demand.milli:
            return False
    return True


def _free(state: State, job_id: str, allocation: Allocation, over: tuple[str, ...]) -> bool:
    """Whether the GPUs, cores and memory are there, and claimed by nobody whom the job may not go before."""
    at = state.at[allocation.node]
    if not state.capacity.holds(allocation.node, allocation.cpu_milli, allocation.memory_mib):
        return False
    for uuid in allocation.gpus:
        if uuid not in at or state.held(allocation.node, uuid) + allocation.milli > WHOLE:
            return False
        claimer = state.claimed.get((allocation.node, uuid))
        if claimer is not None and claimer != job_id and claimer not in over:
            return False
    return len(set(allocation.gpus)) == len(allocation.gpus)


def _place(state: State, action: Place, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    if job is None or not _startable(state, job) or action.attempt != job.attempts + 1:
        return False
    if not _as_asked(job, action.allocations):
        return False
    for allocation in action.allocations:
        if not _working(state, allocation) or not _free(state, job.id, allocation, action.over):
            return False
    drop_claim(state, job.id)
    dequeue(state, job.id)
    firm = is_firm(state, job)
    parts = []
    for allocation in action.allocations:
        part = Part(allocation, charge_of(state, allocation))
        parts.append(part)
        owner, at = state.owner[allocation.node], state.at[allocation.node]
        for uuid in allocation.gpus:
            owner.setdefault(uuid, {})[job.id] = allocation.milli
        state.capacity.take(
            allocation.node, [at[u] for u in allocation.gpus], allocation.milli, allocation.cpu_milli,
            allocation.memory_mib,
        )  # fmt: skip
        state.usage.add(job.queue, part.charge, firm=firm)
    state.usage.count(job.queue, 1)
    kind = (job.queue, job.class_name)
    state.running[kind] = state.running.get(kind, 0) + 1
    if job.array_id:
        state.arrays[job.array_id] = state.arrays.get(job.array_id, 0) + 1
    attempt = Attempt(
        number=action.attempt, fence=recorded.seq, placed_ms=recorded.at_ms, parts=tuple(parts),
        preflight=action.preflight,
    )  # fmt: skip
    state.change(job.id, state="active", attempt=attempt, attempts=action.attempt, reasons=())
    state.active[job.id] = None
    announce(
        state,
        AttemptPlaced(
            job_id=job.id, attempt=action.attempt, fence=recorded.seq, allocations=action.allocations,
            preflight=action.preflight,
        ),
    )  # fmt: skip
    return True


def charge_of(state: State, allocation: Allocation) -> tuple[tuple[str, int], ...]:
    """The GPU share of an allocation by model."""
    gpus, at = state.nodes[allocation.node].gpus, state.at[allocation.node]
    charge: dict[str, int] = {}
    for uuid in allocation.gpus:
        model = gpus[at[uuid]].model
        charge[model] = charge.get(model, 0) + allocation.milli
    return tuple(charge.items())


def _stop(state: State, action: Stop, recorded: Recorded) -> bool:
    job = state.jobs.get(action.job_id)
    attempt = job.attempt if job else None
    if job is None or attempt is None or attempt.number != action.attempt or attempt.released:
        return False
    if attempt.stop is not None:
        return False
    if action.reason == "lost" and not any(p.lost for p in attempt.parts):
        if attempt.running_ms is not None:
            return False  # it started after all
        for node in attempt.silent:
            strike(state, node, job.id)
    preempted = action.reason == "preempted"
    if preempted:
        recent = tuple(t for t in state.preempted_ms if t > recorded.at_ms - REMEMBERED_MS)
        state.preempted_ms = (*recent, recorded.at_ms)
    state.change(
        action.job_id,
        attempt=changed(
            attempt,
            stop=action.reason,
            stop_ms=recorded.at_ms,
            grace_ms=action.grace_ms,
            by=action.by,
            rule=action.rule,
        ),
        preemptions=job.preemptions + preempted,
    )
    if len(attempt.parts) > 1:
        _keep_for_rejoining(state, job, attempt, action, recorded.at_ms)
    return True


def _keep_for_rejoining(state: State, job: Job, attempt: Attempt, stop: Stop, at_ms: int) -> None:
    """A gang that one node failed comes back whole, and soon: what it has on the others is kept for it so long."""
    failed = attempt.failed
    if stop.reason not in NOT_ITS_OWN and not (stop.reason == "peer_failed" and failed and failed.outcome in INFRA):
        return
    bad = {*((failed.node,) if failed else ()), *(attempt.preflight_failed or ())}
    if stop.reason == "lost":
        bad |= set(attempt.silent)
    kept = []
    for part in attempt.parts:
        allocation = part.allocation
        if allocation.milli == WHOLE and allocation.node not in bad and _working(state, allocation):
            keys = [(allocation.node, uuid) for uuid in allocation.gpus]
            claimers = dict.fromkeys(state.claimed[key] for key in keys if key in state.claimed)
            if all(_comes_after(state, state.claims[claimer], job) for claimer in claimers):
                for claimer in claimers:
                    drop_claim(state, claimer)
                kept.append(allocation)
    if not kept:
        return
    until_ms = at_ms + stop.grace_ms + REJOIN_MS
    state.claims[job.id] = entities.Claim(job.id, state.seq, "reserve", tuple(kept), until_ms, until_ms)
    for allocation in kept:
        for uuid in allocation.gpus:
            state.claimed[(allocation.node, uuid)] = job.id


def _comes_after(state: State, claim: entities.Claim, job: Job) -> bool:
    """Whether the claim only waits for natural ends, for a job that would start after this one."""
    other = state.jobs[claim.job_id]
    values = {c.name: c.value for c in state.cluster.classes}
    later = (-values.get(other.class_name, 0), other.seq) > (-values.get(job.class_name, 0), job.seq)
    return claim.kind == "reserve" and later


def strike(state: State, name: str, job_id: str) -> None:
    """Note that the job could not be started on the node."""
    node = state.nodes.get(name)
    if node and job_id not in node.strikes:
        state.nodes[name] = changed(node, strikes=(*node.strikes, job_id))
        state.layout += 1


def _claim(state: State, action: Claim, recorded: Recorded) -> bool:
    if not _claimable(state, action):
        return False
    job_id = action.job_id
    drop_claim(state, job_id)
    state.claims[job_id] = entities.Claim(job_id, recorded.seq, action.kind, action.allocations, action.starts_ms)
    for allocation in action.allocations:
        for uuid in allocation.gpus:
            state.claimed[(allocation.node, uuid)] = job_id
    return True


def _claimable(state: State, action: Claim) -> bool:
    """Whether the job may wait for these GPUs: its nodes work, and nobody else has a claim on any."""
    if not _startable(state, state.jobs.get(action.job_id)):
        return False
    return all(
        _working(state, allocation)
        and all(state.claimed.get((allocation.node, u), action.job_id) == action.job_id for u in allocation.gpus)
        for allocation in action.allocations
    )


def _boost(state: State, action: Boost) -> bool:
    job = state.jobs.get(action.job_id)
    if job is None or job.boosted:
        return False
    requeue_with(state, job.id, boosted=True)
    announce(state, JobBoosted(job_id=job.id, cause=action.cause))
    return True
