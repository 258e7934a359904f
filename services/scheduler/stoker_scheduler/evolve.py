"""`evolve(state, recorded)`: one handler an event type. Illegal transitions are counted and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    AttemptReleased,
    AttemptStarted,
    CancelRequested,
    DecisionBatch,
    FindingRecorded,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    LogsSealed,
    NodeJoined,
    PendingReasonChanged,
    PreflightFailed,
    PreflightPassed,
    Recorded,
    SelfTested,
    VerdictEvent,
)

from .apply import announcement_key, apply_batch, release_part
from .state import Attempt, Job, Node, Part, State


def evolve(state: State, recorded: Recorded) -> State:
    """The state after this event. The state given is consumed."""
    state.seq, state.at_ms = recorded.seq, max(state.at_ms, recorded.at_ms)
    handler = HANDLERS.get(type(recorded.event))
    if handler:
        handler(state, recorded.event, recorded)
    return state


def _submitted(state: State, event: JobSubmitted, recorded: Recorded) -> None:
    if event.job_id in state.jobs:
        state.ignored += 1
        return
    state.put(Job(event.job_id, recorded.seq, event.spec, event.code, recorded.at_ms))
    state.queued[event.job_id] = None


def _cancel(state: State, event: CancelRequested, recorded: Recorded) -> None:
    job = state.jobs.get(event.job_id)
    if job is None or job.state not in ("queued", "active"):
        state.ignored += 1
        return
    state.change(event.job_id, cancel=True)


def _reasons(state: State, event: PendingReasonChanged, recorded: Recorded) -> None:
    if event.job_id in state.jobs:
        state.change(event.job_id, reasons=event.reasons)


def _batch(state: State, event: DecisionBatch, recorded: Recorded) -> None:
    state.decision_seq = recorded.seq
    apply_batch(state, event, recorded)


def _announced(state: State, event: AttemptPlaced | JobRequeued | JobFinished, recorded: Recorded) -> None:
    if state.to_announce.pop(announcement_key(event), None) is None:
        state.ignored += 1


def _current(state: State, job_id: str, number: int) -> tuple[Job, Attempt] | None:
    """The job and its attempt, when that is the present one; reports of old attempts change only a counter."""
    job = state.jobs.get(job_id)
    if job is None or job.attempt is None or job.attempt.number != number:
        state.ignored += 1
        return None
    return job, job.attempt


def _part(state: State, event: Any, change: Callable[[Part], Part]) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found is None:
        return
    job, attempt = found
    if event.fence != attempt.fence:
        state.ignored += 1
        return
    parts = tuple(change(p) if p.allocation.node == event.node else p for p in attempt.parts)
    state.change(job.id, attempt=attempt._replace(parts=parts))


def _started(state: State, event: AttemptStarted, recorded: Recorded) -> None:
    _part(state, event, lambda p: p if p.started_ms is not None else p._replace(started_ms=recorded.at_ms))


def _exited(state: State, event: AttemptExited, recorded: Recorded) -> None:
    _part(state, event, lambda p: p if p.exited else p._replace(exited=event))


def _released(state: State, event: AttemptReleased, recorded: Recorded) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found is None:
        return
    if found[1].fence != event.fence:
        state.ignored += 1
        return
    release_part(state, event.job_id, event.node, recorded.at_ms, lost=False)


def _sealed(state: State, event: LogsSealed, recorded: Recorded) -> None:
    _part(state, event, lambda p: p._replace(sealed=True))


def _attributed(state: State, event: JobFailureAttributed, recorded: Recorded) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found and found[1].attribution is None:
        state.change(event.job_id, attempt=found[1]._replace(attribution=event))


def _joined(state: State, event: NodeJoined, recorded: Recorded) -> None:
    old = state.nodes.get(event.node)
    if old and old.boot_epoch == event.boot_epoch:
        return
    state.nodes[event.node] = Node(event.node, event.boot_epoch, event.gpus, since_ms=recorded.at_ms)
    state.owner.setdefault(event.node, {})
    _forget_tests(state, event.node)
    for job_id in {job_id for job_id, _ in state.owner[event.node].values()}:
        release_part(state, job_id, event.node, recorded.at_ms, lost=True)


def _forget_tests(state: State, node: str) -> None:
    for nodes in [nodes for nodes in state.tested if node in nodes]:
        del state.tested[nodes]


def _verdict(state: State, event: VerdictEvent, recorded: Recorded) -> None:
    node = state.nodes.get(event.node)
    if node is None or node.boot_epoch != event.boot_epoch:
        state.ignored += 1
        return
    verdict = event.verdict
    state.nodes[event.node] = node._replace(
        verdict=verdict, verdict_seq=recorded.seq, since_ms=recorded.at_ms, reason=event.reason
    )
    if verdict in ("degraded", "quarantined"):
        _forget_tests(state, event.node)


def _finding(state: State, event: FindingRecorded, recorded: Recorded) -> None:
    if event.result.status == "bad" and event.result.severity != "info":
        _forget_tests(state, event.node)


def _self_tested(state: State, event: SelfTested, recorded: Recorded) -> None:
    node = state.nodes.get(event.node)
    if event.passed and node and node.boot_epoch == event.boot_epoch:
        state.tested[(event.node,)] = recorded.at_ms


def _preflight_passed(state: State, event: PreflightPassed, recorded: Recorded) -> None:
    state.tested[tuple(sorted(event.nodes))] = recorded.at_ms


def _preflight_failed(state: State, event: PreflightFailed, recorded: Recorded) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found and found[1].preflight_failed is None:
        state.change(event.job_id, attempt=found[1]._replace(preflight_failed=event.nodes))


HANDLERS: dict[type, Callable[[State, Any, Recorded], None]] = {
    JobSubmitted: _submitted,
    CancelRequested: _cancel,
    PendingReasonChanged: _reasons,
    DecisionBatch: _batch,
    AttemptPlaced: _announced,
    JobRequeued: _announced,
    JobFinished: _announced,
    AttemptStarted: _started,
    AttemptExited: _exited,
    AttemptReleased: _released,
    LogsSealed: _sealed,
    JobFailureAttributed: _attributed,
    NodeJoined: _joined,
    FindingRecorded: _finding,
    SelfTested: _self_tested,
    PreflightPassed: _preflight_passed,
    PreflightFailed: _preflight_failed,
    **dict.fromkeys(VerdictEvent.__subclasses__(), _verdict),
}
