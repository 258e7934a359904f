"""/v1/jobs: validate, submit, look, wait, cancel, explain."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from stoker_chassis.stores import Bus
from stoker_proto import AttemptPlaced, JobFinished, JobSpec, ProblemError, Recorded, problem, subjects

from .fit import never_fits
from .given import BusOf, PrincipalOf, ViewsOf, in_time
from .identity import JOB_ID, spec_hash
from .store import Views
from .submission import cancel, submit
from .timeline import story
from .validate import read_spec, read_yaml
from .views import JobView, evolve_job

router = APIRouter(prefix="/v1", tags=["jobs"])
READ_YOUR_WRITES_S = 2.0
MAX_WAIT_S = 60.0


class Submission(BaseModel):
    """A job to validate or submit: the spec as an object or as YAML text, and the digest of its uploaded code."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any] | None = None
    spec_yaml: str | None = Field(None, max_length=100_000)
    code: str | None = None

    async def read(self) -> JobSpec:
        if (self.spec is None) == (self.spec_yaml is None):
            raise ProblemError(
                problem("invalid_request", "Give exactly one of spec (an object) and spec_yaml (a text)")
            )
        if self.spec_yaml is None:
            return read_spec(self.spec)
        return await asyncio.to_thread(read_yaml, self.spec_yaml)  # a long text takes most of a second


class Validated(BaseModel):
    """A valid spec with its defaults, and the hash of what would run."""

    spec: JobSpec
    spec_hash: str


class JobList(BaseModel):
    """Jobs, newest first; `next` is the cursor of the rest."""

    jobs: list[JobView]
    next: str | None = None


class CancelBody(BaseModel):
    reason: str = ""


class Explanation(BaseModel):
    """Why the job waits (reasons, the binding one first), or why it failed (problem)."""

    job_id: str
    state: str
    reasons: list[dict[str, Any]]
    problem: dict[str, Any] | None = None


async def found(bus: Bus, views: Views, job_id: str) -> JobView:
    """The job. One that the log has and this gateway has not read yet was accepted by another gateway just now."""
    view = views.job(job_id)
    if view is None and JOB_ID.fullmatch(job_id):
        first = await bus.log.last(subjects.job_event(job_id, "submitted"))
        if first is not None:
            await views.reached(first.seq, READ_YOUR_WRITES_S)
            view = views.job(job_id) or evolve_job(None, first)
    if view is None:
        raise ProblemError(problem("not_found", f"There is no job {job_id}"))
    return view


@router.post("/jobs:validate")
async def validate(body: Submission, views: ViewsOf) -> Validated:
    """Every mistake at once, or the spec as it would be stored. Nothing is created."""
    spec = await body.read()
    unfit = never_fits(spec, views.inventory())
    if unfit is not None:
        raise ProblemError(unfit)
    return Validated(spec=spec, spec_hash=spec_hash(spec, body.code))


@router.post("/jobs", status_code=201, responses={200: {"description": "the same request was accepted before"}})
async def create(
    body: Submission,
    response: Response,
    bus: BusOf,
    views: ViewsOf,
    principal: PrincipalOf,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> JobView:
    """Accept a job: it is in the log, durably, before the answer. The same key and body give the same job."""
    accepted = await submit(bus, views, await body.read(), body.code, idempotency_key, principal)
    if accepted.replayed:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    await views.reached(accepted.seq, READ_YOUR_WRITES_S)
    return await found(bus, views, accepted.job_id)


@router.get("/jobs")
async def list_jobs(
    views: ViewsOf,
    state: Annotated[
        list[Literal["queued", "active", "succeeded", "failed", "cancelled", "expired"]] | None, Query()
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[int | None, Query(ge=1, le=2**62)] = None,
) -> JobList:
    """Jobs, newest first."""
    rows = views.jobs(state or (), limit + 1, cursor)
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


@router.post("/jobs/{job_id}:cancel", status_code=202)
async def cancel_job(
    job_id: str, bus: BusOf, views: ViewsOf, principal: PrincipalOf, body: CancelBody | None = None
) -> JobView:
    """Ask for the job's end. A job that is over stays as it is; asking twice is asking once."""
    view = await found(bus, views, job_id)
    if view.final:
        return view
    seq = await cancel(bus, job_id, body.reason if body else "", principal)
    await views.reached(seq, READ_YOUR_WRITES_S)
    return await found(bus, views, job_id)


@router.get("/jobs/{job_id}/explanation")
async def explain(job_id: str, bus: BusOf, views: ViewsOf) -> Explanation:
    """Why it waits, or why it failed."""
    view = await found(bus, views, job_id)
    told = view.problem.model_dump(mode="json", exclude_none=True) if view.problem else None
    reasons = [r.model_dump(mode="json") for r in view.reasons]
    return Explanation(job_id=job_id, state=view.state, reasons=reasons, problem=told)


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
