"""Accepting a job: durable in the log before the answer, and the same answer for the same key."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_chassis.clock import new_id, stamp
from stoker_chassis.eventlog import Conflict, Expect
from stoker_chassis.stores import Bus
from stoker_proto import CancelRequested, JobSpec, JobSubmitted, ProblemError, problem, subjects

from .fit import never_fits
from .identity import fingerprint, keyed_job_id, spec_hash
from .store import Views

SOURCE = "gateway"


@dataclass(frozen=True)
class Accepted:
    job_id: str
    seq: int
    replayed: bool


async def submit(bus: Bus, views: Views, spec: JobSpec, code: str | None, key: str | None, principal: str) -> Accepted:
    """Append the job. Raises ProblemError when it can never run, or its key stands for another request."""
    if code is None and spec.code_source is not None:
        raise ProblemError(problem("code_missing", "code_source is given, but no code blob was sent with the spec"))
    if code is not None and not await bus.blobs.has(code):
        told = f"There is no blob {code}; upload it with PUT /v1/blobs/{code} first"
        raise ProblemError(problem("code_missing", told))
    unfit = never_fits(spec, [n.gpus for n in views.nodes()])
    if unfit is not None:
        raise ProblemError(unfit)
    key = key or spec.idempotency_token
    job_id = keyed_job_id(principal, key) if key else f"job-{new_id().lower()[-16:]}"
    event = JobSubmitted(
        job_id=job_id,
        spec=spec,
        spec_hash=spec_hash(spec, code),
        code=code,
        idempotency_key=key,
        fingerprint=fingerprint(spec, code),
    )
    envelope = stamp(event, SOURCE, id=f"submitted:{job_id}", actor=principal)
    try:
        landed = await bus.log.append(envelope, Expect(event.subject(), 0))
        replayed, seq = landed.duplicate, landed.seq
    except Conflict as conflict:
        replayed, seq = True, conflict.actual
    if replayed:
        await _same(bus, event)
    return Accepted(job_id, seq, replayed)


async def _same(bus: Bus, event: JobSubmitted) -> None:
    """The key is in use: for this very request, or for another one?"""
    first = await bus.log.last(event.subject())
    if first is None or not isinstance(first.event, JobSubmitted) or first.event.fingerprint != event.fingerprint:
        told = f"The key {event.idempotency_key!r} stands for {event.job_id}, which was submitted with another body"
        raise ProblemError(problem("idempotency_key_reused", told, facts={"job_id": event.job_id}))


async def cancel(bus: Bus, job_id: str, reason: str, principal: str) -> int:
    """Ask for the job's end. Asking twice is asking once."""
    event = CancelRequested(job_id=job_id, reason=reason)
    envelope = stamp(event, SOURCE, id=f"cancel:{job_id}", actor=principal)
    try:
        return (await bus.log.append(envelope, Expect(subjects.job_event(job_id, "cancel_requested"), 0))).seq
    except Conflict as conflict:
        return conflict.actual
