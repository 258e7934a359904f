"""Desired state per node, projected from the scheduler's state: what launchers make true."""

from __future__ import annotations

from stoker_proto import Assignment, NodeAssignments

from .state import State


def desired(state: State) -> dict[str, NodeAssignments]:
    """Every node's whole desired state; a part that was released is gone from it."""
    attempts: dict[str, list[Assignment]] = {name: [] for name in state.nodes}
    for job_id in state.active:
        job = state.jobs[job_id]
        attempt = job.attempt
        if attempt is None:
            continue
        allocations = tuple(p.allocation for p in attempt.parts)
        assignment = Assignment(
            job_id=job.id,
            attempt=attempt.number,
            fence=attempt.fence,
            want="run" if attempt.stop is None else "stop",
            stop_reason=attempt.stop,
            grace_ms=attempt.grace_ms,
            spec=job.spec,
            code=job.code,
            array_id=job.array_id,
            array_index=job.array_index,
            allocations=allocations,
            preflight=attempt.preflight,
        )
        for part in attempt.parts:
            if part.released_ms is None:
                attempts[part.allocation.node].append(assignment)
    return {
        name: NodeAssignments(node=name, seq=state.seq, attempts=tuple(sorted(todo, key=lambda a: a.fence)))
        for name, todo in attempts.items()
    }
