"""/v1/jobs: validate, submit, look, wait, follow, cancel, explain."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict
from sse_starlette import EventSourceResponse, ServerSentEvent

from stoker_proto import JobSpec, ProblemError, Recorded, problem, subjects

from .fit import never_fits
from .given import BusOf, PrincipalOf, ViewsOf
from .identity import spec_hash
from .store import Views
from .streams import event_row, events, log_lines, parse_cursor
from .submission import cancel, submit
from .timeline import story
from .validate import read_spec, read_yaml
from .views import JobView

router = APIRouter(prefix="/v1", tags=["jobs"])
READ_YOUR_WRITES_S = 2.0
MAX_WAIT_S = 60.0


class Submission(BaseModel):
    """A job to validate or submit: the spec as an object or as YAML text, and the digest of its uploaded code."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any] | None = None
    spec_yaml: str | None = None
    code: str | None = None

    def read(self) -> JobSpec:
        if (self.spec is None) == (self.spec_yaml is None):
            raise ProblemError(
                problem("invalid_request", "Give exactly one of spec (an object) and spec_yaml (a text)")
            )
        return read_yaml(self.spec_yaml) if self.spec_yaml is not None else read_spec(self.spec)


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


def found(views: Views, job_id: str) -> JobView:
    view = views.job(job_id)
    if view is None:
        raise ProblemError(problem("not_found", f"There is no job {job_id}"))
    return view


@router.post("/jobs:validate")
async def validate(body: Submission, views: ViewsOf) -> Validated:
    """Every mistake at once, or the spec as it would be stored. Nothing is created."""
    spec = body.read()
    unfit = never_fits(spec, [n.gpus for n in views.nodes()])
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
    accepted = await submit(bus, views, body.read(), body.code, idempotency_key, principal)
    if accepted.replayed:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    if not await views.reached(accepted.seq, READ_YOUR_WRITES_S):
        told = f"{accepted.job_id} is accepted and in the log; the view of it lags behind. Ask for it in a moment"
        raise ProblemError(problem("log_unavailable", told, retry_after_s=1, facts={"job_id": accepted.job_id}))
    return found(views, accepted.job_id)


@router.get("/jobs")
async def list_jobs(
    views: ViewsOf,
    state: Annotated[
        list[Literal["queued", "active", "succeeded", "failed", "cancelled", "expired"]] | None, Query()
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[int | None, Query()] = None,
) -> JobList:
    """Jobs, newest first."""
    rows = views.jobs(state or (), limit + 1, cursor)
    more = len(rows) > limit
    return JobList(jobs=[v for _, v in rows[:limit]], next=str(rows[limit - 1][0]) if more else None)


@router.get("/jobs/{job_id}")
async def get_job(
    job_id: str,
    views: ViewsOf,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    until: Literal["changed", "terminal", "mirrored"] = "terminal",
    seq: int | None = None,
) -> JobView:
    """The job; with `wait` answered when it is terminal (or has changed since `seq`), or after that many seconds."""
    view = found(views, job_id)
    known = view.seq if seq is None else seq
    deadline = time.monotonic() + wait
    while not _reached(view, until, known) and (left := deadline - time.monotonic()) > 0:
        await views.change(views.seq, left)
        view = found(views, job_id)
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
    view = found(views, job_id)
    if not view.final:
        seq = await cancel(bus, job_id, body.reason if body else "", principal)
        await views.reached(seq, READ_YOUR_WRITES_S)
    return found(views, job_id)


@router.get("/jobs/{job_id}/explanation")
async def explain(job_id: str, views: ViewsOf) -> Explanation:
    """Why it waits, or why it failed."""
    view = found(views, job_id)
    told = view.problem.model_dump(mode="json", exclude_none=True) if view.problem else None
    reasons = [r.model_dump(mode="json") for r in view.reasons]
    return Explanation(job_id=job_id, state=view.state, reasons=reasons, problem=told)


@router.get("/jobs/{job_id}/timeline")
async def timeline(job_id: str, bus: BusOf, views: ViewsOf) -> dict[str, Any]:
    """The job's story from the log, its nodes' faults included."""
    view = found(views, job_id)
    records: list[Recorded] = [r async for r in bus.log.read(0, subjects.job_events(job_id))]
    for node in {n for a in view.attempts for n in a.nodes}:
        records += [r async for r in bus.log.read(records[0].seq, f"stoker.event.node.{node}.>")]
    return {"job_id": job_id, "timeline": story(sorted(records, key=lambda r: r.seq))}


def wants_sse(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("Accept", "")


def cursor_of(request: Request, after: str | None) -> str | None:
    """A client that reconnects says in Last-Event-ID what it has seen."""
    return request.headers.get("Last-Event-ID") or after


@router.get("/jobs/{job_id}/events", response_model=None)
async def job_events(
    job_id: str, request: Request, bus: BusOf, views: ViewsOf, after: int = 0
) -> dict[str, Any] | EventSourceResponse:
    """The job's events after a sequence: a list, or (Accept: text/event-stream) followed until the job is over."""
    found(views, job_id)
    return await event_answer(request, bus, views, job_id, after)


async def event_answer(
    request: Request, bus: BusOf, views: Views, job_id: str | None, after: int
) -> dict[str, Any] | EventSourceResponse:
    start = _sequence(cursor_of(request, str(after)))
    if not wants_sse(request):
        rows = [event_row(r) async for r in events(bus, views, job_id, start, follow=False) if r is not None]
        return {"events": rows, "last": rows[-1]["seq"] if rows else start}
    return EventSourceResponse(_sse_events(bus, views, job_id, start))


def _sequence(cursor: str | None) -> int:
    if cursor is None or not cursor.isdigit():
        raise ProblemError(problem("invalid_request", f"{cursor!r} is not a sequence of the log"))
    return int(cursor)


async def _sse_events(bus: BusOf, views: Views, job_id: str | None, after: int) -> AsyncIterator[ServerSentEvent]:
    async for recorded in events(bus, views, job_id, after, follow=True):
        if recorded is None:
            yield ServerSentEvent(comment="heartbeat")
        else:
            body = json.dumps(event_row(recorded))
            yield ServerSentEvent(data=body, id=str(recorded.seq), event=recorded.envelope.type)


@router.get("/jobs/{job_id}/logs", response_model=None)
async def job_logs(
    job_id: str,
    request: Request,
    bus: BusOf,
    views: ViewsOf,
    follow: bool = False,
    after: str | None = None,
    rank: int | None = None,
    tail: Annotated[int | None, Query(ge=0, le=100_000)] = None,
) -> Response:
    """Log lines as NDJSON, or (Accept: text/event-stream) as events whose id is the line's cursor."""
    found(views, job_id)
    cursor = cursor_of(request, after)
    try:
        parse_cursor(cursor)
    except ValueError:
        raise ProblemError(problem("invalid_request", f"{cursor!r} is not a log cursor")) from None
    if tail is not None and not follow:
        kept = [line async for line in log_lines(bus, views, job_id, cursor, rank, follow=False) if line is not None]
        text = "".join(json.dumps(line) + "\n" for line in kept[max(0, len(kept) - tail) :])
        return Response(text, media_type="application/x-ndjson")
    lines = log_lines(bus, views, job_id, cursor, rank, follow=follow)
    if wants_sse(request):

        async def sse() -> AsyncIterator[ServerSentEvent]:
            async for line in lines:
                if line is None:
                    yield ServerSentEvent(comment="heartbeat")
                else:
                    yield ServerSentEvent(data=json.dumps(line), id=line["cursor"], event="line")
            yield ServerSentEvent(data="{}", event="end")

        return EventSourceResponse(sse())

    async def ndjson() -> AsyncIterator[str]:
        async for line in lines:
            if line is not None:
                yield json.dumps(line) + "\n"

    return StreamingResponse(ndjson(), media_type="application/x-ndjson")
