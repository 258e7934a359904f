"""Desired state per node, projected from the scheduler's state: what launchers make true."""

from __future__ import annotations

from typing import NamedTuple

from stoker_proto import Assignment, NodeAssignments

from .state import Attempt, Job, State


class _Known(NamedTuple):
    """An active job as it was when last looked at. Attempts are replaced whole when anything about them changes."""

    attempt: Attempt
    assignment: Assignment
    held: frozenset[str]


class Desired:
    """Every node's whole desired state, kept in step: only what has changed is made anew."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._on: dict[str, dict[str, Assignment]] = {}

    def changes(self, state: State) -> dict[str, NodeAssignments]:
        """Nodes whose desired state is another one than at the last call; at first all of them."""
        known, changed = self._known, dict.fromkeys(name for name in state.nodes if name not in self._on)
        for name in changed:
            self._on[name] = {}
        for job_id in state.active:
            job = state.jobs[job_id]
            before = known.get(job_id)
            if job.attempt is None or (before is not None and before.attempt is job.attempt):
                continue
            now = known[job_id] = _known(job, job.attempt, before)
            if before is None or before.assignment != now.assignment or before.held != now.held:
                changed.update(dict.fromkeys(self._leave(job_id, before)))
                for name in now.held:
                    self._on[name][job_id] = now.assignment
                    changed[name] = None
        for job_id in known.keys() - state.active.keys():
            changed.update(dict.fromkeys(self._leave(job_id, known.pop(job_id))))
        return {
            name: NodeAssignments(
                node=name, seq=state.seq, attempts=tuple(sorted(self._on[name].values(), key=lambda a: a.fence))
            )
            for name in changed
        }

    def _leave(self, job_id: str, before: _Known | None) -> frozenset[str]:
        if before is None:
            return frozenset()
        for name in before.held:
            del self._on[name][job_id]
        return before.held


def _known(job: Job, attempt: Attempt, before: _Known | None) -> _Known:
    """A part that was released is gone from the desired state."""
    held = frozenset(part.allocation.node for part in attempt.parts if part.released_ms is None)
    if before is not None:
        old = before.assignment
        same = (old.fence, old.stop_reason, old.grace_ms) == (attempt.fence, attempt.stop, attempt.grace_ms)
        if same:
            return _Known(attempt, old, held)
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
        allocations=tuple(part.allocation for part in attempt.parts),
        preflight=attempt.preflight,
    )
    return _Known(attempt, assignment, held)


def desired(state: State) -> dict[str, NodeAssignments]:
    """Every node's whole desired state."""
    return Desired().changes(state)
