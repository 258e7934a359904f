"""From events to what MLflow should hold, as values. Pure: the same log always asks for the same writes.

MLflow's limits (3.x): keys of at most 250 characters out of letters, digits, _ - . space / and colon; parameters are
written once, 6,000 characters at most; tags 8,000; a batch holds 1,000 metrics or 100 parameters or 100 tags.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker_proto import (
    AttemptPlaced,
    AttemptStarted,
    CancelRequested,
    JobBoosted,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    Point,
    Recorded,
)
from stoker_proto.spec import Compute

RunStatus = Literal["SCHEDULED", "RUNNING", "FINISHED", "FAILED", "KILLED"]
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6000, 8000
LARGEST = 2**63 - 1
BAD_KEY = re.compile(r"[^\w\-./ :]")
TERMINAL: dict[str, RunStatus] = {
    "succeeded": "FINISHED",
    "failed": "FAILED",
    "expired": "FAILED",
    "cancelled": "KILLED",
}


@dataclass(frozen=True)
class NewRun:
    """The MLflow run that a job must have."""

    experiment: str
    name: str
    start_ms: int
    params: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Update:
    """What to change on a run: tags, and its status when it has one to set."""

    tags: tuple[tuple[str, str], ...] = ()
    status: RunStatus | None = None


@dataclass(frozen=True)
class Measured:
    """One metric point as MLflow takes it."""

    key: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class Ending:
    """How a run ends: its last metrics and tags, and its terminal status, which comes last."""

    status: RunStatus
    end_ms: int
    tags: tuple[tuple[str, str], ...]
    metrics: tuple[Measured, ...] = field(default=())


def clean_key(key: str) -> str:
    """A key that MLflow takes. Keys that differ stay different: one that had to be changed carries a hash."""
    clean = BAD_KEY.sub("_", key.replace("@", "_at_"))
    # MLflow takes keys for paths: no part of one may be empty, "." or "..", and none may begin with "..".
    clean = "/".join(part for part in clean.split("/") if part.strip(".")) or "_"
    clean = f"_{clean}" if clean.startswith("..") else clean
    if clean == key and len(key) <= KEY_LENGTH:
        return key
    mark = hashlib.sha256(key.encode()).hexdigest()[:8]
    return f"{clean[: KEY_LENGTH - 9]}-{mark}"


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested parameters as dotted names."""
    flat: list[tuple[str, Any]] = []
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            flat += flatten(inner, f"{name}.")
        else:
            flat.append((name, inner))
    return flat


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def new_run(event: JobSubmitted, recorded: Recorded) -> NewRun:
    """The run of a job that was just accepted."""
    spec = event.spec
    compute = spec.compute
    params, cut = [], []
    for name, value in flatten(spec.parameters):
        text = as_text(value).replace("\0", " ")
        if len(text) > PARAM_LENGTH:
            cut.append(name)
        params.append((clean_key(name), text[:PARAM_LENGTH]))
    tags = {
        "stoker.job_id": event.job_id,
        "stoker.status": "queued",
        "stoker.spec_hash": event.spec_hash,
        "stoker.actor": recorded.envelope.actor,
        "stoker.accelerators": _accelerators(compute),
        "stoker.queue": compute.queue,
        "stoker.priority_class": compute.priority_class,
        "stoker.run": spec.entrypoint or spec.command or "",
    }
    if event.array_id is not None:
        tags |= {"stoker.array_id": event.array_id, "stoker.array_index": str(event.array_index)}
    if event.code:
        tags["stoker.code"] = event.code
    if cut:
        tags["stoker.truncated_params"] = ", ".join(cut)
    if spec.metric:
        tags["stoker.metric"] = f"{spec.metric.direction} {spec.metric.name}"
    tags |= {f"label.{name}": value for name, value in spec.labels.items()}
    return NewRun(
        experiment=spec.experiment_name,
        name=spec.mlflow_run_name or event.job_id,
        start_ms=recorded.at_ms,
        params=tuple(dict(params).items()),
        tags=clean_tags(tags),
    )


def _accelerators(compute: Compute) -> str:
    share = f", {compute.gpu_fraction:g} of each" if compute.milli < 1000 else ""
    return f"{compute.num_accelerators} as {compute.accelerator_type}{share}"


def preemptions(history: Iterable[Recorded]) -> int:
    """How often the job has been preempted, from its events."""
    return sum(isinstance(r.event, JobRequeued) and r.event.outcome == "preempted" for r in history)


def clean_tags(tags: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((clean_key(k), v.replace("\0", " ")[:TAG_LENGTH]) for k, v in tags.items())


def update(recorded: Recorded) -> Update | None:
    """What an event changes on the job's run; None when nothing."""
    match recorded.event:
        case JobSubmitted():
            return Update(status="SCHEDULED")
        case AttemptPlaced() as event:
            nodes = ", ".join(a.node for a in event.allocations)
            number = event.attempt
            tags = {"stoker.status": "active", "stoker.attempts": str(number), f"stoker.attempt.{number}.nodes": nodes}
            return Update(clean_tags(tags), "RUNNING")
        case AttemptStarted() as event if event.resume_step is not None:
            return Update(clean_tags({f"stoker.attempt.{event.attempt}.resume_step": str(event.resume_step)}))
        case JobRequeued() as event:
            mine = f"stoker.attempt.{event.attempt}"
            tags = {"stoker.status": "queued", f"{mine}.outcome": event.outcome, f"{mine}.cause": event.cause}
            return Update(clean_tags(tags))
        case JobBoosted() as event:
            return Update(clean_tags({"stoker.boosted": event.cause}))
        case CancelRequested():
            return Update(clean_tags({"stoker.status": "cancelling"}))
    return None


def ending(event: JobFinished, recorded: Recorded, history: Sequence[Recorded]) -> Ending:
    """How the job's run ends. `history` holds the job's events."""
    submitted_ms = next(r.at_ms for r in history if isinstance(r.event, JobSubmitted))
    started_ms = next((r.at_ms for r in history if isinstance(r.event, AttemptStarted)), None)
    end_ms = recorded.at_ms
    numbers = {
        "stoker/queue_seconds": ((started_ms or end_ms) - submitted_ms) / 1000,
        "stoker/run_seconds": (end_ms - started_ms) / 1000 if started_ms else 0.0,
        "stoker/gpu_hours": event.gpu_ms / 3_600_000,
    }
    tags = {"stoker.status": event.state, "stoker.outcome": event.outcome, "stoker.attempts": str(event.attempts)}
    if count := preemptions(history):
        tags["stoker.preemptions"] = str(count)
    if event.problem is not None:
        tags |= {"stoker.problem_code": event.problem.code, "stoker.problem": event.problem.detail}
    return Ending(
        status=TERMINAL[event.state],
        end_ms=end_ms,
        tags=clean_tags(tags),
        metrics=tuple(Measured(key, value, 0, end_ms) for key, value in numbers.items()),
    )


def measured(points: Iterable[Point]) -> list[Measured]:
    """Points as MLflow takes them: NaN as NaN; infinities as they are, which MLflow keeps as its largest number."""
    return [
        Measured(
            clean_key(p.key), _number(p.value), max(-LARGEST, min(LARGEST, p.step)), max(0, min(LARGEST, p.time_ms))
        )
        for p in points
    ]


def _number(value: float | str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan
