"""A Stoker log as a workload: the same jobs at the same times, as long as they took, on the nodes that were there.

What a job took in all is what its last attempt ran, and what earlier ones had saved by their last checkpoint. How it
ended is not simulated: its simulated attempts end well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    AttemptReleased,
    AttemptStarted,
    CancelRequested,
    CheckpointSaved,
    ClusterConfigured,
    Event,
    HoldReleased,
    HoldRequested,
    JobSubmitted,
    NodeJoined,
    PriorityChanged,
    VerdictEvent,
    from_line,
)

from .traces import TOLD, BadInput
from .workload import MS_IN_MINUTE, Happening, Work, Workload

WISHES = (CancelRequested, HoldRequested, HoldReleased, PriorityChanged)


@dataclass(slots=True)
class _Try:
    placed_ms: int
    started_ms: int | None = None
    saved_ms: int | None = None
    exited_ms: int | None = None
    released_ms: int | None = None


@dataclass(slots=True)
class _Past:
    at_ms: int
    submitted: JobSubmitted
    tries: dict[int, _Try] = field(default_factory=dict)


def read_log(path: Path, *, nodes: bool, cluster: bool) -> Workload:
    """The jobs of an exported log; with its nodes and their health, and with its configurations, if asked for."""
    pasts: dict[str, _Past] = {}
    happenings: list[Happening] = []
    last_ms = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    recorded = from_line(line)
                except (ValueError, KeyError) as error:
                    told = str(error).splitlines()[0]
                    raise BadInput(f"{path}: line {number} is no event of an exported log: {told}") from error
                event, last_ms = recorded.event, recorded.at_ms
                if isinstance(event, JobSubmitted):
                    pasts.setdefault(event.job_id, _Past(last_ms, event))
                elif isinstance(event, WISHES) or _wanted(event, nodes=nodes, cluster=cluster):
                    happenings.append(Happening(last_ms, event))
                else:
                    _note(pasts, event, last_ms)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no exported log: {error}") from error
    if not pasts:
        raise BadInput(f"{path}: no job was submitted in this log")
    works = [work for past in pasts.values() if (work := _work(past, last_ms)) is not None]
    known = {work.job_id for work in works}
    kept = [told for told in happenings if not isinstance(told.event, WISHES) or told.event.job_id in known]
    if not works:
        raise BadInput(f"{path}: none of its {len(pasts)} jobs started, so nobody knows how long they take")
    return Workload(tuple(works), tuple(kept), _left_out([job_id for job_id in pasts if job_id not in known]))


def _wanted(event: Event, *, nodes: bool, cluster: bool) -> bool:
    return (nodes and isinstance(event, NodeJoined | VerdictEvent)) or (
        cluster and isinstance(event, ClusterConfigured)
    )


def _note(pasts: dict[str, _Past], event: Event, at_ms: int) -> None:
    if isinstance(event, AttemptPlaced) and event.job_id in pasts:
        pasts[event.job_id].tries[event.attempt] = _Try(at_ms)
        return
    if not isinstance(event, AttemptStarted | CheckpointSaved | AttemptExited | AttemptReleased):
        return
    past = pasts.get(event.job_id)
    tried = past.tries.get(event.attempt) if past else None
    if tried is None:
        return
    match event:  # of a gang, the last node counts
        case AttemptStarted():
            tried.started_ms = at_ms
        case CheckpointSaved():
            tried.saved_ms = at_ms
        case AttemptExited():
            tried.exited_ms = at_ms
        case AttemptReleased():
            tried.released_ms = at_ms


def _work(past: _Past, last_ms: int) -> Work | None:
    """What the job takes; one that still ran when the log ends takes what it has taken so far."""
    event = past.submitted
    begun = [tried for _, tried in sorted(past.tries.items()) if tried.started_ms is not None]
    launch = release = 0
    if begun:
        duration = 0
        for tried in begun[:-1]:
            duration += max(0, (tried.saved_ms or 0) - (tried.started_ms or 0)) if tried.saved_ms else 0
        final = begun[-1]
        started = final.started_ms or 0
        duration += (final.exited_ms if final.exited_ms is not None else last_ms) - started
        launch = started - final.placed_ms
        if final.exited_ms is not None and final.released_ms is not None:
            release = max(0, final.released_ms - final.exited_ms)
    elif event.spec.limits.timeout_minutes is not None:
        duration = int(event.spec.limits.timeout_minutes * MS_IN_MINUTE)
    else:
        return None
    return Work(
        event.job_id, past.at_ms, event.spec, max(1, duration), launch, release, event.array_id, event.array_index
    )


def _left_out(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return (f"{len(names)} jobs left out, which never started: {', '.join(names[:TOLD])}{more}",)
