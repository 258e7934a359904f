"""/v1/jobs/{id}/explanation: why a job waits, as the scheduler sees it now, or why it failed."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel

from stoker_chassis.stores import Bus
from stoker_proto import Displaced, ExplainAsked, Explained, Problem, ProblemError, Reason, problem

from .asking import ask
from .given import BusOf, ViewsOf
from .jobs import found

router = APIRouter(prefix="/v1", tags=["jobs"])
PAUSES_S = (0.05, 0.2, 0.5)  # for a scheduler that has not read yet of a job that is in the log


class Explanation(BaseModel):
    """Why the job waits (reasons, the binding one first), or why it failed (problem).

    True as of event `as_of_seq`. Without an answer of the scheduler `unanswered` says why, and the reasons are the last
    that it wrote into the log. `starts_ms` and `at_ms` are on the log's clock; `ahead` counts jobs.
    """

    job_id: str
    state: str
    as_of_seq: int | None = None
    at_ms: int | None = None
    reasons: tuple[Reason, ...] = ()
    starts_ms: int | None = None
    ahead: int | None = None
    displaces: tuple[Displaced, ...] = ()
    problem: Problem | None = None
    unanswered: Problem | None = None


@router.get("/jobs/{job_id}/explanation")
async def explain(job_id: str, bus: BusOf, views: ViewsOf) -> Explanation:
    """Why it waits, or why it failed."""
    view = await found(bus, views, job_id)
    if view.final:
        return Explanation(job_id=job_id, state=view.state, as_of_seq=view.seq, problem=view.problem)
    try:
        told = await _ask(bus, job_id)
    except ProblemError as error:
        view = views.job(job_id) or view
        return Explanation(
            job_id=job_id, state=view.state, as_of_seq=view.reasons_seq, reasons=view.reasons, problem=view.problem,
            unanswered=error.problem,
        )  # fmt: skip
    return Explanation(
        job_id=job_id, state=told.state, as_of_seq=told.seq, at_ms=told.at_ms, reasons=told.reasons,
        starts_ms=told.starts_ms, ahead=told.ahead, displaces=told.displaces,
    )  # fmt: skip


async def _ask(bus: Bus, job_id: str) -> Explained:
    for pause in (*PAUSES_S, None):
        try:
            return await ask(bus, "explain", ExplainAsked(job_id=job_id), Explained)
        except ProblemError as error:
            if error.problem.code != "not_found":
                raise
            if pause is not None:
                await asyncio.sleep(pause)
    raise ProblemError(problem("scheduler_unavailable", "The scheduler has not read of the job yet", retry_after_s=2))
