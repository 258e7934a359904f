"""What may be asked of a job, or of all jobs of an array, once it is in: to end, to be held, to go first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from stoker_chassis.clock import stamp
from stoker_chassis.stores import Bus
from stoker_proto import CancelRequested, Envelope, HoldReleased, HoldRequested, PriorityChanged, ProblemError, problem
from stoker_proto.jobs import JobEvent

from .given import READ_YOUR_WRITES_S, BusOf, PrincipalOf, ViewsOf, caught_up
from .jobs import ArrayView, found
from .store import Views
from .submission import AT_ONCE, SOURCE, append_many
from .views import JobView

router = APIRouter(prefix="/v1", tags=["jobs"])


class Why(BaseModel):
    reason: str = Field("", max_length=1000, description="kept in the log")


class Wanted(BaseModel):
    priority: int = Field(ge=-1000, le=1000, description="a higher number goes first inside queue and class")


class Asked(NamedTuple):
    """Who asks, of what: a job, or every job of the array `array_id`."""

    bus: Bus
    views: Views
    principal: str
    array_id: str | None
    jobs: Sequence[JobView]

    @property
    def unfinished(self) -> list[JobView]:
        return [job for job in self.jobs if not job.final]

    async def tell(self, make: Callable[[JobView], JobEvent | None], lasting: str | None = None) -> JobView | ArrayView:
        """Append an event for each unfinished job that needs one; with `lasting` a job needs one for ever."""

        def seal(event: JobEvent) -> Envelope:
            id = f"{lasting}:{event.job_id}" if lasting else None
            return stamp(event, SOURCE, id=id, actor=self.principal)

        events = (event for job in self.unfinished if (event := make(job)) is not None)
        seq = await append_many(self.bus, map(seal, events))
        await self.views.reached(seq, READ_YOUR_WRITES_S)
        if self.array_id is None:
            return await found(self.bus, self.views, self.jobs[0].job_id)
        return ArrayView(array_id=self.array_id, jobs=[job.job_id for job in self.unfinished])

    def not_over(self, what: str) -> Asked:
        """Itself. Raises ProblemError when there is nothing left to ask for."""
        if not self.unfinished:
            name, state = self.array_id or self.jobs[0].job_id, "" if self.array_id else f" ({self.jobs[0].state})"
            raise ProblemError(problem("job_over", f"{name} is over{state} and cannot be {what} any more"))
        return self


async def asked(job_id: str, bus: BusOf, views: ViewsOf, principal: PrincipalOf) -> Asked:
    try:
        return Asked(bus, views, principal, None, [await found(bus, views, job_id)])
    except ProblemError:
        await caught_up(bus, views)
        jobs = await _jobs_of(views, job_id)
        if not jobs:
            raise
        return Asked(bus, views, principal, job_id, jobs)


async def _jobs_of(views: Views, array_id: str) -> list[JobView]:
    """All jobs of an array, in order; others have their turn in between."""
    found: list[tuple[int, JobView]] = []
    while page := views.jobs((), AT_ONCE, found[-1][0] if found else None, array_id):
        found += page
        await asyncio.sleep(0)
    return [job for _, job in reversed(found)]


async def asked_now(job_id: str, bus: BusOf, views: ViewsOf, principal: PrincipalOf) -> Asked:
    """For requests that may be taken back: what counts is how the job stands at this moment, in every gateway."""
    await caught_up(bus, views)
    return await asked(job_id, bus, views, principal)


AskedOf = Annotated[Asked, Depends(asked)]
AskedNow = Annotated[Asked, Depends(asked_now)]


@router.post("/jobs/{job_id}:cancel", status_code=202)
async def cancel(asked: AskedOf, body: Why | None = None) -> JobView | ArrayView:
    """Ask for the end of a job, or of every job of an array. What is over stays so; asking twice is asking once."""
    reason = body.reason if body else ""
    return await asked.tell(
        lambda job: None if job.cancelling else CancelRequested(job_id=job.job_id, reason=reason), lasting="cancel"
    )


@router.post("/jobs/{job_id}:hold", status_code=202)
async def hold(asked: AskedNow, body: Why | None = None) -> JobView | ArrayView:
    """Start no new attempt of the job until it is released; what runs goes on. Held is held, however often asked."""
    reason = body.reason if body else ""
    told = asked.not_over("held")
    return await told.tell(lambda job: None if job.held else HoldRequested(job_id=job.job_id, reason=reason))


@router.post("/jobs/{job_id}:release", status_code=202)
async def release(asked: AskedNow, body: Why | None = None) -> JobView | ArrayView:
    """Let a held job start again."""
    reason = body.reason if body else ""
    told = asked.not_over("released")
    return await told.tell(lambda job: HoldReleased(job_id=job.job_id, reason=reason) if job.held else None)


@router.post("/jobs/{job_id}:priority", status_code=202)
async def priority(asked: AskedNow, body: Wanted) -> JobView | ArrayView:
    """Give the job another place inside its queue and class."""
    wanted = body.priority
    return await asked.not_over("moved").tell(
        lambda job: PriorityChanged(job_id=job.job_id, priority=wanted) if job.priority != wanted else None
    )
