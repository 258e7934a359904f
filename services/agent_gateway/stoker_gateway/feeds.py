"""Events and logs over HTTP: a page or a file at once, or followed as server-sent events that resume by their id."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from stoker_chassis.stores import Bus
from stoker_proto import ProblemError, Recorded, problem, subjects

from .given import BusOf, ViewsOf, in_time
from .jobs import found
from .streams import Line, all_events, event_row, last_lines, log_lines, parse_cursor
from .streams import job_events as events_of

router = APIRouter(prefix="/v1", tags=["feeds"])
HEARTBEAT_S = 15
MAX_EVENTS = 1000
SSE: dict[str, Any] = {"text/event-stream": {}}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": SSE}}
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}} | SSE}}


def wants_sse(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("Accept", "")


def cursor_of(request: Request, after: str | None) -> str | None:
    """A client that reconnects says in Last-Event-ID what it has seen."""
    return request.headers.get("Last-Event-ID") or after or None


Limit = Annotated[int, Query(ge=1, le=MAX_EVENTS)]


@router.get("/jobs/{job_id}/events", response_model=None, responses=EVENTS)
async def job_events(
    job_id: str, request: Request, bus: BusOf, views: ViewsOf, after: str = "0", limit: Limit = MAX_EVENTS
) -> dict[str, Any] | EventSourceResponse:
    """The job's events after a sequence: a page, or (Accept: text/event-stream) followed until the job is over."""
    await found(bus, views, job_id)
    start = await start_of(request, bus, after)
    if wants_sse(request):
        return sse_of(events_of(bus, views, job_id, start))
    return await page(bus.log.read(start, subjects.job_events(job_id)), start, limit)


@router.get("/events", response_model=None, responses=EVENTS)
async def every_event(
    request: Request, bus: BusOf, after: str = "0", limit: Limit = MAX_EVENTS
) -> dict[str, Any] | EventSourceResponse:
    """The log after a sequence: a page, or (Accept: text/event-stream) followed for ever."""
    start = await start_of(request, bus, after)
    return sse_of(all_events(bus, start)) if wants_sse(request) else await page(bus.log.read(start), start, limit)


async def start_of(request: Request, bus: Bus, after: str) -> int:
    """The sequence to go on after. Raises ProblemError when the log has never come that far."""
    cursor = cursor_of(request, after) or "0"
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise ProblemError(problem("invalid_request", f"{cursor!r} is not a sequence of the log"))
    start = int(cursor)
    if start and start > (end := await bus.log.end()):
        told = f"The log ends at {end}; {start} is of another log. Read again from after=0"
        raise ProblemError(problem("invalid_request", told, facts={"end": end}))
    return start


async def page(records: AsyncIterator[Recorded], after: int, limit: int) -> dict[str, Any]:
    """Up to `limit` events; `last` is where the next page begins, `more` whether there is one."""
    rows: list[dict[str, Any]] = []
    async with in_time():
        async for recorded in records:
            if len(rows) == limit:
                return {"events": rows, "last": rows[-1]["seq"], "more": True}
            rows.append(event_row(recorded))
    return {"events": rows, "last": rows[-1]["seq"] if rows else after, "more": False}


def sse_of(records: AsyncIterator[Recorded]) -> EventSourceResponse:
    async def messages() -> AsyncIterator[ServerSentEvent]:
        async for recorded in records:
            body = json.dumps(event_row(recorded))
            yield ServerSentEvent(data=body, id=str(recorded.seq), event=recorded.envelope.type)

    return EventSourceResponse(messages(), ping=HEARTBEAT_S)


@router.get("/jobs/{job_id}/logs", response_model=None, responses=LINES)
async def job_logs(
    job_id: str,
    request: Request,
    bus: BusOf,
    views: ViewsOf,
    follow: bool = False,
    after: str | None = None,
    rank: Annotated[int | None, Query(ge=0)] = None,
    tail: Annotated[int | None, Query(ge=0, le=100_000)] = None,
) -> Response:
    """Log lines as NDJSON, or (Accept: text/event-stream) as events whose id is the line's cursor, then `end`."""
    await found(bus, views, job_id)
    cursor = cursor_of(request, after)
    try:
        parse_cursor(cursor)
    except ValueError:
        raise ProblemError(problem("invalid_request", f"{cursor!r} is not a log cursor")) from None
    if tail is None:
        lines = log_lines(bus, views, job_id, cursor, rank, follow=follow)
    else:
        lines = last_lines(bus, views, job_id, cursor, rank, tail, follow=follow)
    if wants_sse(request):
        return EventSourceResponse(_line_messages(lines), ping=HEARTBEAT_S)

    async def ndjson() -> AsyncIterator[str]:
        async for line in lines:
            yield json.dumps(line) + "\n"

    return StreamingResponse(ndjson(), media_type="application/x-ndjson")


async def _line_messages(lines: AsyncIterator[Line]) -> AsyncIterator[ServerSentEvent]:
    async for line in lines:
        yield ServerSentEvent(data=json.dumps(line), id=line["cursor"], event="line")
    yield ServerSentEvent(data="{}", event="end")
