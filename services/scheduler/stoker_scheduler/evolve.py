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
    CheckpointSaved,
    ClusterConfigured,
    DecisionBatch,
    Event,
    FindingRecorded,
    HoldReleased,
    HoldRequested,
    JobBoosted,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    LeaderElected,
    LogsSealed,
    NodeJoined,
    PendingReasonChanged,
    PreflightFailed,
    PreflightPassed,
    PriorityChanged,
    Recorded,
    SelfTested,
    VerdictEvent,
    WindowClosed,
    WindowOpened,
)

from .announce import announcement_key
from .apply import apply_batch, strike
from .leaving import release_part
from .queueing import configure, demand_of, drop_claim, enqueue, first_gates, requeue_with
from .state import Attempt, Job, Node, Part, State, changed

MIB = 1 << 20


def evolve(state: State, recorded: Recorded) -> State:
    """The state after this event. The state given is consumed."""
    if recorded.at_ms < state.at_ms:  # another server of the log, whose clock is behind: time stands still until then
        recorded = Recorded(recorded.seq, state.at_ms, b"", recorded.event)
    state.seq, state.at_ms = recorded.seq, recorded.at_ms
    handler = HANDLERS.get(type(recorded.event))
    if handler:
        handler(state, recorded.event, recorded)
    return state


def _submitted(state: State, event: JobSubmitted, recorded: Recorded) -> None:
    job_id, spec = event.job_id, event.spec
    if job_id in state.jobs or job_id in state.over:
        state.ignored += 1
        return
    demand = demand_of(spec)
    waits_for, refused = first_gates(state, job_id, spec)
    job = Job(
        id=job_id, seq=recorded.seq, spec=spec, code=event.code, submitted_ms=recorded.at_ms, since_ms=recorded.at_ms,
        priority=spec.compute.priority, demand=demand, array_id=event.array_id, array_index=event.array_index,
        held=spec.schedule.hold, waits_for=waits_for, refused=refused,
    )  # fmt: skip
    state.put(job)
    state.popular.add(demand.shape, demand.nodes)
    if spec.schedule.deadline is not None:
        state.deadlines[job_id] = int(spec.schedule.deadline.timestamp() * 1000)
    enqueue(state, job)


def _cancel(state: State, event: CancelRequested, recorded: Recorded) -> None:
    if event.job_id not in state.jobs:
        state.ignored += 1
        return
    drop_claim(state, event.job_id)
    requeue_with(state, event.job_id, cancel=True)


def _hold(state: State, event: HoldRequested | HoldReleased, recorded: Recorded) -> None:
    if event.job_id not in state.jobs:
        state.ignored += 1
        return
    requeue_with(state, event.job_id, held=isinstance(event, HoldRequested))


def _priority(state: State, event: PriorityChanged, recorded: Recorded) -> None:
    if event.job_id not in state.jobs:
        state.ignored += 1
        return
    requeue_with(state, event.job_id, priority=event.priority)


def _configured(state: State, event: ClusterConfigured, recorded: Recorded) -> None:
    if event.version <= state.version:
        state.ignored += 1
        return
    configure(state, event.version, event.cluster)


def _window(state: State, event: WindowOpened | WindowClosed, recorded: Recorded) -> None:
    if any(window.name == event.window for window in state.cluster.windows):
        state.windows[event.window] = isinstance(event, WindowOpened)


def _reasons(state: State, event: PendingReasonChanged, recorded: Recorded) -> None:
    if event.job_id in state.jobs:
        state.change(event.job_id, reasons=event.reasons)
        state.untold.pop(event.job_id, None)


def _batch(state: State, event: DecisionBatch, recorded: Recorded) -> None:
    state.decision_seq = recorded.seq
    if event.based_on_seq < state.led_seq:  # by a leader that was replaced before it wrote
        state.voided += len(event.actions)
        return
    apply_batch(state, event, recorded)


def _elected(state: State, event: LeaderElected, recorded: Recorded) -> None:
    if event.service == "scheduler":
        state.led_seq, state.led_ms = recorded.seq, recorded.at_ms


def _announced(state: State, event: AttemptPlaced | JobRequeued | JobFinished | JobBoosted, recorded: Recorded) -> None:
    if state.to_announce.pop(announcement_key(event), None) is None:
        state.ignored += 1


def _current(state: State, job_id: str, number: int) -> tuple[Job, Attempt] | None:
    """The job and its attempt, when that is the present one; reports of old attempts change only a counter."""
    job = state.jobs.get(job_id)
    if job is None or job.attempt is None or job.attempt.number != number:
        state.ignored += 1
        return None
    return job, job.attempt


def _part(state: State, event: Any, change: Callable[[Part], Part]) -> bool:
    """Change the node's part of the present attempt; False when the report is of another one."""
    found = _current(state, event.job_id, event.attempt)
    if found is None:
        return False
    job, attempt = found
    if event.fence != attempt.fence:
        state.ignored += 1
        return False
    parts = tuple(change(p) if p.allocation.node == event.node else p for p in attempt.parts)
    state.change(job.id, attempt=changed(attempt, parts=parts))
    return True


def _started(state: State, event: AttemptStarted, recorded: Recorded) -> None:
    if not _part(state, event, lambda p: p if p.started_ms is not None else changed(p, started_ms=recorded.at_ms)):
        return
    node = state.nodes.get(event.node)
    if node and node.strikes:
        state.nodes[event.node] = changed(node, strikes=())
        state.layout += 1


def _saved(state: State, event: CheckpointSaved, recorded: Recorded) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found:
        state.change(event.job_id, attempt=changed(found[1], saved_ms=recorded.at_ms))


def _exited(state: State, event: AttemptExited, recorded: Recorded) -> None:
    current = _part(state, event, lambda p: p if p.exited else changed(p, exited=event))
    if current and event.outcome == "launch_rejected" and event.asked is None:
        strike(state, event.node, event.job_id)


def _released(state: State, event: AttemptReleased, recorded: Recorded) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found is None:
        return
    if found[1].fence != event.fence:
        state.ignored += 1
        return
    release_part(state, event.job_id, event.node, recorded.at_ms, lost=False)


def _sealed(state: State, event: LogsSealed, recorded: Recorded) -> None:
    _part(state, event, lambda p: changed(p, sealed=True))


def _attributed(state: State, event: JobFailureAttributed, recorded: Recorded) -> None:
    found = _current(state, event.job_id, event.attempt)
    if found and found[1].attribution is None:
        state.change(event.job_id, attempt=changed(found[1], attribution=event))


def _joined(state: State, event: NodeJoined, recorded: Recorded) -> None:
    old = state.nodes.get(event.node)
    if old and old.boot_epoch == event.boot_epoch:
        return
    for job_id in sorted(state.holders(event.node)):
        release_part(state, job_id, event.node, recorded.at_ms, lost=True)
    node = Node(
        event.node, event.boot_epoch, event.gpus, cpu_milli=event.cpus * 1000, memory_mib=event.memory_bytes // MIB,
        labels=event.labels, since_ms=recorded.at_ms,
    )  # fmt: skip
    state.nodes[event.node] = node
    state.owner[event.node] = {}
    state.at[event.node] = {gpu.uuid: index for index, gpu in enumerate(event.gpus)}
    state.capacity.join(event.node, [gpu.model for gpu in event.gpus], node.cpu_milli, node.memory_mib)
    state.layout += 1
    _forget_tests(state, event.node)


def _forget_tests(state: State, node: str) -> None:
    for nodes in [nodes for nodes in state.tested if node in nodes]:
        del state.tested[nodes]


def _verdict(state: State, event: VerdictEvent, recorded: Recorded) -> None:
    node = state.nodes.get(event.node)
    if node is None or node.boot_epoch != event.boot_epoch:
        state.ignored += 1
        return
    verdict = event.verdict
    strikes = () if verdict == "ready" else node.strikes
    since_ms = node.since_ms if verdict == node.verdict else recorded.at_ms
    state.nodes[event.node] = changed(
        node, verdict=verdict, verdict_seq=recorded.seq, since_ms=since_ms, reason=event.reason, strikes=strikes
    )
    state.layout += 1
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
        state.change(event.job_id, attempt=changed(found[1], preflight_failed=event.nodes))


HANDLERS: dict[type[Event], Callable[[State, Any, Recorded], None]] = {
    JobSubmitted: _submitted,
    CancelRequested: _cancel,
    HoldRequested: _hold,
    HoldReleased: _hold,
    PriorityChanged: _priority,
    ClusterConfigured: _configured,
    WindowOpened: _window,
    WindowClosed: _window,
    PendingReasonChanged: _reasons,
    DecisionBatch: _batch,
    LeaderElected: _elected,
    AttemptPlaced: _announced,
    JobRequeued: _announced,
    JobFinished: _announced,
    JobBoosted: _announced,
    AttemptStarted: _started,
    CheckpointSaved: _saved,
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
