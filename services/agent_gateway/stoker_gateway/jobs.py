"""/v1/jobs: validate, plan, submit, look, wait."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel

from stoker_chassis.stores import Bus
from stoker_proto import (
    AttemptPlaced,
    JobFinished,
    JobSpec,
    PlanAsked,
    Planned,
    ProblemError,
    Recorded,
    problem,
    subjects,
)

from .admission import Submission, read
from .asking import ask
from .given import READ_YOUR_WRITES_S, BusOf, PrincipalOf, ViewsOf, in_time
from .identity import JOB_ID, spec_hash
from .store import Views
from .submission import submit
from .timeline import story
from .views import JobView, evolve_job

router = APIRouter(prefix="/v1", tags=["jobs"])
MAX_WAIT_S = 60.0


class Validated(BaseModel):
    """A valid spec with its defaults, and the hash of what would run."""

    spec: JobSpec
    spec_hash: str


class Plan(Validated):
    """A valid spec, and what would become of the job now."""

    plan: Planned


class JobList(BaseModel):
    """Jobs, newest first; `next` is the cursor of the rest."""

    jobs: list[JobView]
    next: str | None = None


class ArrayView(BaseModel):
    """An array and the ids of those of its jobs that the request was about."""

    array_id: str
    jobs: list[str]


async def found(bus: Bus, views: Views, job_id: str) -> JobView:
    """The job. One that the log has and this gateway has not read yet was accepted by another gateway just now."""
    view = views.job(job_id)
    if view is None and JOB_ID.fullmatch(job_id):
        first = await bus.log.last(subjects.job_event(job_id, "submitted"))
        if first is not None:
            await views.reached(first.seq, READ_YOUR_WRITES_S)
            view = views.job(job_id) or evolve_job(None, first)
    if view is None and views.has_array(job_id):
        told = f"{job_id} is an array, and its jobs go by their own ids"
        raise ProblemError(problem("not_found", told, next_actions=(f"stoker list --array {job_id}",)))
    if view is None:
        raise ProblemError(problem("not_found", f"There is no job {job_id}"))
    return view


@router.post("/jobs:validate")
async def validate(body: Submission, bus: BusOf, views: ViewsOf) -> Validated:
    """Every mistake at once, or the spec as it would be stored. Nothing is created."""
    spec = (await read(body, bus, views)).admitted()
    return Validated(spec=spec, spec_hash=spec_hash(spec, body.code))


@router.post("/jobs:plan")
async def plan(body: Submission, bus: BusOf, views: ViewsOf) -> Plan:
    """What would become of the job, were it submitted now: refused as it would be, or planned. Nothing is created."""
    spec = (await read(body, bus, views)).admitted()
    return Plan(
        spec=spec, spec_hash=spec_hash(spec, body.code), plan=await ask(bus, "plan", PlanAsked(spec=spec), Planned)
    )


@router.post("/jobs", status_code=201, responses={200: {"description": "the same request was accepted before"}})
async def create(
    body: Submission,
    response: Response,
    bus: BusOf,
    views: ViewsOf,
    principal: PrincipalOf,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> JobView | ArrayView:
    """Accept a job or every job of an array: in the log, durably, before the answer. The same key and body give the
    same job or array, and complete an array that was broken off.
    """
    given = await read(body, bus, views)
    accepted = await submit(bus, views, given, body.code, idempotency_key, principal)
    if accepted.replayed:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    await views.reached(accepted.seq, READ_YOUR_WRITES_S)
    if accepted.array_id:
        return ArrayView(array_id=accepted.array_id, jobs=list(accepted.jobs))
    return await found(bus, views, accepted.jobs[0])


@router.get("/jobs")
async def list_jobs(
    views: ViewsOf,
    state: Annotated[
        list[Literal["queued", "active", "succeeded", "failed", "cancelled", "expired"]] | None, Query()
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    array: Annotated[str | None, Query(max_length=100)] = None,
) -> JobList:
    """Jobs, newest first, or those of one array."""
    rows = views.jobs(state or (), limit + 1, cursor, array)
    more = len(rows) > limit
    return JobList(jobs=[v for _, v in rows[:limit]], next=str(rows[limit - 1][0]) if more else None)


@router.get("/jobs/{job_id}")
async def get_job(
    job_id: str,
    bus: BusOf,
    views: ViewsOf,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    until: Literal["changed", "terminal", "mirrored"] = "terminal",
    seq: int | None = None,
) -> JobView:
    """The job; with `wait` answered when it is terminal (or has changed since `seq`), or after that many seconds."""
    view = await found(bus, views, job_id)
    known = view.seq if seq is None else seq
    deadline = time.monotonic() + wait
    while not _reached(view, until, known) and (left := deadline - time.monotonic()) > 0:
        await views.change(views.seq, left)
        view = views.job(job_id) or view
    return view


def _reached(view: JobView, until: str, known: int) -> bool:
    if until == "changed":
        return view.seq > known
    return view.mirrored if until == "mirrored" else view.final


@router.get("/jobs/{job_id}/timeline")
async def timeline(job_id: str, bus: BusOf, views: ViewsOf) -> dict[str, Any]:
    """The job's story from the log, its nodes' faults included."""
    await found(bus, views, job_id)
    async with in_time():
        records = await _story_of(bus, job_id)
    return {"job_id": job_id, "timeline": story(records)}


async def _story_of(bus: Bus, job_id: str) -> list[Recorded]:
    """The job's events, and what was found on nodes from its first event to its last, in order."""
    records = [r async for r in bus.log.read(0, subjects.job_events(job_id))]
    finished = next((r.seq for r in records if isinstance(r.event, JobFinished)), None)
    for verb in ("finding_recorded", "verdict") if any(isinstance(r.event, AttemptPlaced) for r in records) else ():
        async for recorded in bus.log.read(records[0].seq, subjects.node_event("*", verb)):
            if finished is not None and recorded.seq > finished:
                break
            records.append(recorded)
    return sorted(records, key=lambda r: r.seq)
