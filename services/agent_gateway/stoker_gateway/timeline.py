"""A job's story for people: one line an event that matters, with the log's time. Pure."""

from __future__ import annotations

from typing import Any

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    AttemptProgressed,
    AttemptReleased,
    AttemptStarted,
    CancelRequested,
    CheckpointSaved,
    FindingRecorded,
    HoldReleased,
    HoldRequested,
    JobBoosted,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    MirrorCompleted,
    NodeQuarantined,
    PendingReasonChanged,
    PreflightFailed,
    PreflightPassed,
    PriorityChanged,
    Recorded,
    RunMirrored,
)


def line_of(recorded: Recorded) -> dict[str, Any] | None:
    """The event's line; None when it would tell a person nothing."""
    told = _told(recorded)
    return {"seq": recorded.seq, "at_ms": recorded.at_ms, "what": told[0], "detail": told[1]} if told else None


def _told(recorded: Recorded) -> tuple[str, str] | None:
    event = recorded.event
    match event:
        case JobSubmitted():
            compute = event.spec.compute
            return "submitted", f"{compute.num_accelerators} x {compute.accelerator_type} by {recorded.envelope.actor}"
        case PendingReasonChanged():
            return "waiting", event.reasons[0].message if event.reasons else ""
        case AttemptPlaced():
            where = ", ".join(a.node for a in event.allocations)
            return "placed", f"attempt {event.attempt} on {where}; preflight {event.preflight}"
        case PreflightPassed():
            return "preflight passed", ", ".join(event.nodes)
        case PreflightFailed():
            return "preflight failed", event.detail
        case AttemptStarted():
            resumed = f", resumed at step {event.resume_step}" if event.resume_step is not None else ""
            return "started", f"ranks {', '.join(map(str, event.ranks))} on {event.node}{resumed}"
        case AttemptProgressed():
            return "progressed", f"step {event.step}"
        case CheckpointSaved():
            return "checkpoint", f"step {event.step}, {event.bytes} bytes"
        case FindingRecorded():
            return "fault", f"{event.result.detail or event.result.check} on {event.node} ({event.result.entity})"
        case NodeQuarantined():
            return "quarantined", f"{event.node}: {event.reason}"
        case AttemptExited():
            return "exited", f"{event.outcome} on {event.node}"
        case JobFailureAttributed():
            return "blamed", f"{event.outcome}, blame {event.blame}: {event.problem.detail}"
        case AttemptReleased():
            return "released", f"{event.node}: {event.proof}"
        case JobRequeued():
            return "requeued", event.cause
        case CancelRequested():
            return "cancel requested", event.reason
        case HoldRequested():
            return "held", event.reason
        case HoldReleased():
            return "hold released", event.reason
        case PriorityChanged():
            return "priority", f"{event.priority} from here on"
        case JobBoosted():
            return "boosted", "it has waited long" if event.cause == "waited" else "it was preempted often"
        case JobFinished():
            return "finished", f"{event.state} after {event.attempts} attempt(s), {event.gpu_ms / 1000:.0f} GPU-seconds"
        case RunMirrored():
            return "mirrored", event.url
        case MirrorCompleted():
            return "mirror complete", f"{event.points} metric points"
    return None


def story(records: list[Recorded]) -> list[dict[str, Any]]:
    """Lines of a job's own events and of its nodes' faults while it was on them."""
    on: set[str] = set()
    lines = []
    for recorded in records:
        event = recorded.event
        if isinstance(event, AttemptPlaced):
            on |= {a.node for a in event.allocations}
        if isinstance(event, FindingRecorded | NodeQuarantined) and event.node not in on:
            continue
        if isinstance(event, JobRequeued | JobFinished):
            on.clear()
        line = line_of(recorded)
        if line is not None:
            lines.append(line)
    return lines
