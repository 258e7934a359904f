"""What the API shows of jobs and nodes, as pure folds: one view and one event in, the next view out."""

from __future__ import annotations

from typing import Any, Literal

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    AttemptPrepared,
    AttemptProgressed,
    AttemptReleased,
    AttemptStarted,
    CancelRequested,
    CheckpointSaved,
    FindingRecorded,
    Frozen,
    Gpu,
    HoldReleased,
    HoldRequested,
    JobBoosted,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobSpec,
    JobState,
    JobSubmitted,
    MirrorCompleted,
    NodeJoined,
    NodeReady,
    NodeReleased,
    Outcome,
    PendingReasonChanged,
    PreflightPassed,
    PreflightStarted,
    PriorityChanged,
    Problem,
    Reason,
    Recorded,
    RunMirrored,
    Verdict,
    VerdictEvent,
)

AttemptState = Literal["placed", "preparing", "preflight", "running", "exited", "released"]


class AttemptView(Frozen):
    """One attempt of a job."""

    number: int
    state: AttemptState = "placed"
    nodes: tuple[str, ...]
    placed_ms: int
    started_ms: int | None = None
    resume_step: int | None = None
    outcome: Outcome | None = None
    cause: str | None = None
    exited_nodes: tuple[str, ...] = ()
    released_nodes: tuple[str, ...] = ()


class JobView(Frozen):
    """A job as the API shows it. `seq` is the sequence of the last event that changed it (or its `reasons`)."""

    job_id: str
    seq: int
    state: JobState
    cancelling: bool = False
    experiment_name: str
    actor: str
    spec: JobSpec
    queue: str
    priority: int
    held: bool = False
    boosted: bool = False
    array_id: str | None = None
    array_index: int | None = None
    spec_hash: str
    code: str | None = None
    idempotency_key: str | None = None
    fingerprint: str | None = None
    submitted_seq: int
    submitted_ms: int
    started_ms: int | None = None
    finished_ms: int | None = None
    attempts: tuple[AttemptView, ...] = ()
    step: int | None = None
    checkpoint_step: int | None = None
    outcome: Outcome | None = None
    gpu_ms: int = 0
    problem: Problem | None = None
    reasons: tuple[Reason, ...] = ()
    reasons_seq: int | None = None
    mlflow_run_id: str | None = None
    mlflow_url: str | None = None
    mirrored: bool = False

    @property
    def final(self) -> bool:
        return self.state not in ("queued", "active")


class NodeView(Frozen):
    """A node as the API shows it."""

    node: str
    seq: int
    boot_epoch: str
    verdict: Verdict = "validating"
    rule: str | None = None
    reason: str | None = None
    since_ms: int
    simulated: bool
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    labels: dict[str, str]
    findings: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


FINDINGS_SHOWN = 10


def evolve_job(view: JobView | None, recorded: Recorded) -> JobView | None:
    """The job's view after an event about it; None while the job is not known."""
    event = recorded.event
    if isinstance(event, JobSubmitted):
        return view or _submitted(event, recorded)
    if view is None:
        return None
    return view.model_copy(update={"seq": recorded.seq} | _job_changes(view, recorded))


def _submitted(event: JobSubmitted, recorded: Recorded) -> JobView:
    return JobView(
        job_id=event.job_id,
        seq=recorded.seq,
        state="queued",
        experiment_name=event.spec.experiment_name,
        actor=recorded.envelope.actor,
        spec=event.spec,
        queue=event.spec.compute.queue,
        priority=event.spec.compute.priority,
        held=event.spec.schedule.hold,
        array_id=event.array_id,
        array_index=event.array_index,
        spec_hash=event.spec_hash,
        code=event.code,
        idempotency_key=event.idempotency_key,
        fingerprint=event.fingerprint,
        submitted_seq=recorded.seq,
        submitted_ms=recorded.at_ms,
    )


def _job_changes(view: JobView, recorded: Recorded) -> dict[str, Any]:
    event, at_ms = recorded.event, recorded.at_ms
    match event:
        case CancelRequested():
            return {} if view.final else {"cancelling": True}
        case HoldRequested() | HoldReleased() if not view.final:
            return {"held": isinstance(event, HoldRequested)}
        case PriorityChanged() if not view.final:
            return {"priority": event.priority}
        case JobBoosted():
            return {"boosted": True}
        case PendingReasonChanged():
            return {} if view.state != "queued" else {"reasons": event.reasons, "reasons_seq": recorded.seq}
        case AttemptPlaced() if view.final or any(a.number == event.attempt for a in view.attempts):
            return {}
        case AttemptPlaced():
            nodes = tuple(a.node for a in event.allocations)
            attempt = AttemptView(number=event.attempt, nodes=nodes, placed_ms=at_ms)
            return {"state": "active", "reasons": (), "reasons_seq": None, "attempts": (*view.attempts, attempt)}
        case AttemptPrepared():
            return _attempt(view, event.attempt, state="preparing")
        case PreflightStarted() | PreflightPassed():
            return _attempt(view, event.attempt, state="preflight")
        case AttemptStarted():
            changed = _attempt(view, event.attempt, state="running", started_ms=at_ms, resume_step=event.resume_step)
            return changed | ({"started_ms": at_ms} if view.started_ms is None else {})
        case AttemptProgressed():
            return {"step": event.step}
        case CheckpointSaved():
            return {"checkpoint_step": event.step, "step": max(view.step or 0, event.step)}
        case AttemptExited():
            return _left(view, event, "exited")
        case AttemptReleased():
            return _left(view, event, "released")
        case JobFailureAttributed():
            return _attempt(view, event.attempt, outcome=event.outcome, cause=event.problem.detail)
        case JobRequeued() if view.state == "active":
            ended = _attempt(view, event.attempt, state="released", outcome=event.outcome, cause=event.cause)
            return {"state": "queued"} | ended
        case JobFinished() if not view.final:
            # Cancelled while it waited: its last attempt ended before, in its own way.
            active = view.state == "active"
            ended = _attempt(view, event.attempts, state="released", outcome=event.outcome) if active else {}
            return ended | {
                "state": event.state, "cancelling": False, "outcome": event.outcome, "gpu_ms": event.gpu_ms,
                "problem": event.problem, "finished_ms": at_ms, "reasons": (), "reasons_seq": None,
            }  # fmt: skip
        case RunMirrored():
            return {"mlflow_run_id": event.run_id, "mlflow_url": event.url}
        case MirrorCompleted():
            return {"mirrored": True}
        case _:
            return {}


ORDER: tuple[AttemptState, ...] = ("placed", "preparing", "preflight", "running", "exited", "released")


def _attempt(view: JobView, number: int, **changes: Any) -> dict[str, Any]:
    """One attempt changed. Its nodes report in any order, so the state only ever goes forward."""
    attempts = []
    for attempt in view.attempts:
        if attempt.number == number:
            wanted = changes.get("state", attempt.state)
            forward = wanted if ORDER.index(wanted) > ORDER.index(attempt.state) else attempt.state
            kept = {"started_ms": attempt.started_ms} if attempt.started_ms is not None else {}
            attempt = attempt.model_copy(update=changes | {"state": forward} | kept)
        attempts.append(attempt)
    return {"attempts": tuple(attempts)}


def _left(
    view: JobView, event: AttemptExited | AttemptReleased, state: Literal["exited", "released"]
) -> dict[str, Any]:
    """One node is done with the attempt; the attempt is when all of them are."""
    attempt = next((a for a in view.attempts if a.number == event.attempt), None)
    if attempt is None:
        return {}
    field = f"{state}_nodes"
    done = tuple(sorted({*getattr(attempt, field), event.node}))
    changes: dict[str, Any] = {field: done}
    if set(done) >= set(attempt.nodes):
        changes["state"] = state
    return _attempt(view, event.attempt, **changes)


def evolve_node(view: NodeView | None, recorded: Recorded) -> NodeView | None:
    """The node's view after an event about it."""
    event = recorded.event
    if isinstance(event, NodeJoined):
        if view is not None and view.boot_epoch == event.boot_epoch:
            return view
        return NodeView(
            node=event.node,
            seq=recorded.seq,
            boot_epoch=event.boot_epoch,
            since_ms=recorded.at_ms,
            simulated=event.simulated,
            cpus=event.cpus,
            memory_bytes=event.memory_bytes,
            gpus=event.gpus,
            labels=event.labels,
        )
    if view is None:
        return None
    if isinstance(event, VerdictEvent) and event.boot_epoch == view.boot_epoch:
        changes: dict[str, Any] = {
            "verdict": event.verdict, "rule": event.rule, "reason": event.reason, "since_ms": recorded.at_ms,
        }  # fmt: skip
        if isinstance(event, NodeReady | NodeReleased):
            changes["findings"] = ()
        return view.model_copy(update={"seq": recorded.seq} | changes)
    if isinstance(event, FindingRecorded) and event.boot_epoch == view.boot_epoch:
        told = f"{event.result.check} on {event.result.entity}: {event.result.detail or event.result.status}"
        findings = (*view.findings, told)[-FINDINGS_SHOWN:]
        return view.model_copy(update={"seq": recorded.seq, "findings": findings})
    return view


def holders(recorded: Recorded) -> dict[str, str]:
    """Nodes on which an attempt begins to hold GPUs with this event, as node -> job/attempt."""
    event = recorded.event
    if isinstance(event, AttemptPlaced):
        return {a.node: f"{event.job_id}/{event.attempt}" for a in event.allocations}
    return {}


def freed(recorded: Recorded) -> tuple[str | None, str] | None:
    """The (node, job/attempt) that holds nothing any more after this event; node None means on every node."""
    event = recorded.event
    if isinstance(event, AttemptReleased):
        return event.node, f"{event.job_id}/{event.attempt}"
    if isinstance(event, JobRequeued):
        return None, f"{event.job_id}/{event.attempt}"
    if isinstance(event, JobFinished):
        return None, f"{event.job_id}/{event.attempts}"
    return None


def hold(view: NodeView | None, *, add: str | None = None, drop: str | None = None) -> NodeView | None:
    """The node's view after an attempt took or gave back its GPUs."""
    if view is None:
        return None
    holds = tuple(h for h in view.holds if h not in (add, drop)) + ((add,) if add else ())
    return view if holds == view.holds else view.model_copy(update={"holds": holds})
