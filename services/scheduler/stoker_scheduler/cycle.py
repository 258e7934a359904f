"""`schedule(state, now_ms)`: one pass over all that waits or runs; decisions and reasons out, nothing touched."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_proto import Action, Fence, Finish, Place, Reason, Stop, StopReason

from .ending import Wait, conclude
from .explain import held_back, why_not_placed
from .gang import excluded, matching, place
from .state import Attempt, Job, Node, State


@dataclass(frozen=True, slots=True)
class Timing:
    """The numbers that the pass goes by, in milliseconds of the log's clock."""

    fresh_ms: int = 600_000
    start_deadline_ms: int = 180_000
    fence_ms: int = 300_000


@dataclass(slots=True)
class Pass:
    """What one pass decided. `due_ms` is the next moment at which deciding again could matter without a new event."""

    actions: list[Action] = field(default_factory=list)
    reasons: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
    due_ms: int | None = None

    def wait(self, until_ms: int) -> None:
        self.due_ms = until_ms if self.due_ms is None else min(self.due_ms, until_ms)


def schedule(state: State, now_ms: int, timing: Timing) -> Pass:
    """Decide: end what has ended, stop what must stop, then place what waits, in order."""
    out = Pass()
    for job_id in state.active:
        job = state.jobs[job_id]
        if job.attempt is not None:
            _attend(job, job.attempt, state, now_ms, timing, out)
    _place_queue(state, now_ms, timing, out)
    return out


def _attend(job: Job, attempt: Attempt, state: State, now_ms: int, timing: Timing, out: Pass) -> None:
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
        reason = _must_stop(job, attempt, state, now_ms, timing, out)
        if reason is not None:
            grace = 0 if reason in ("peer_failed", "preflight_failed") else int(job.spec.limits.grace_seconds * 1000)
            out.actions.append(Stop(job_id=job.id, attempt=attempt.number, reason=reason, grace_ms=grace))


def _must_stop(job: Job, attempt: Attempt, state: State, now_ms: int, timing: Timing, out: Pass) -> StopReason | None:
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
    started = attempt.started_ms
    if started is None or any(p.started_ms is None for p in attempt.parts):
        deadline, reason = attempt.placed_ms + timing.start_deadline_ms, "lost"
    elif job.spec.limits.timeout_minutes is not None:
        deadline, reason = started + int(job.spec.limits.timeout_minutes * 60_000), "timeout"
    else:
        return None
    if now_ms >= deadline:
        return "timeout" if reason == "timeout" else "lost"
    out.wait(deadline)
    return None


def _place_queue(state: State, now_ms: int, timing: Timing, out: Pass) -> None:
    """Place waiting jobs by class, then order of submission.

    A job that is blocked keeps later ones off the GPUs it waits for, so that small jobs cannot starve a gang; a job
    that could not run even on empty working nodes blocks nobody. Free GPUs only get fewer within a pass, so a shape
    that found no place is not tried again, and its reasons are those of every later job of that shape.
    """
    nodes = sorted((n for n in state.nodes.values() if n.takes_work), key=lambda n: n.name)
    free = {n.name: state.free(n) for n in nodes}
    every_model = tuple(sorted({g.model for n in nodes for g in n.gpus}))
    first_blocked: dict[str, str] = {}
    unplaced: dict[tuple[object, ...], tuple[Reason, ...]] = {}
    for job in sorted((state.jobs[j] for j in state.queued), key=lambda j: j.order):
        if job.cancel:
            out.actions.append(Finish(job_id=job.id, state="cancelled", outcome="cancelled"))
            continue
        if job.not_before_ms > now_ms:
            out.reasons[job.id] = (held_back(job, now_ms),)
            out.wait(job.not_before_ms)
            continue
        avoid = excluded(job, state, now_ms)
        for exclusion in job.exclusions:
            if exclusion.until_ms > now_ms:
                out.wait(exclusion.until_ms)
        compute = job.spec.compute
        models = every_model if compute.model == "ANY" else (compute.model,)
        ahead = tuple(dict.fromkeys(first_blocked[m] for m in models if m in first_blocked))
        shape = (compute.model, compute.per_node, compute.nodes, avoid, ahead)
        if shape in unplaced:
            out.reasons[job.id] = unplaced[shape]
            continue
        chosen = None if ahead else place(job, nodes, free, avoid)
        if chosen is None:
            unplaced[shape] = out.reasons[job.id] = why_not_placed(job, state, free, avoid, ahead)
            if _fits_when_empty(job, nodes, avoid):
                for model in models:
                    first_blocked.setdefault(model, job.id)
            continue
        for allocation in chosen:
            free[allocation.node] = tuple(u for u in free[allocation.node] if u not in allocation.gpus)
        names = tuple(sorted(a.node for a in chosen))
        fresh = _fresh(state, names, now_ms, timing)
        out.actions.append(
            Place(
                job_id=job.id,
                attempt=job.attempts + 1,
                allocations=chosen,
                preflight="fresh" if fresh else "required",
            )
        )


def _fits_when_empty(job: Job, nodes: list[Node], avoid: tuple[str, ...]) -> bool:
    compute = job.spec.compute
    able = [n for n in nodes if n.name not in avoid and len(matching(n, compute.model)) >= compute.per_node]
    return len(able) >= compute.nodes


def _fresh(state: State, names: tuple[str, ...], now_ms: int, timing: Timing) -> bool:
    """Whether these nodes passed one test together lately, with nothing found on any of them since."""
    wanted = set(names)
    return any(wanted <= set(nodes) and now_ms - at_ms < timing.fresh_ms for nodes, at_ms in state.tested.items())
