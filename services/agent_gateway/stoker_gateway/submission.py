"""Accepting a job: durable in the log before the answer, and the same answer for the same key."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_chassis.clock import new_id, stamp
from stoker_chassis.eventlog import Conflict, Expect
from stoker_chassis.stores import Bus
from stoker_chassis.telemetry import span
from stoker_proto import CancelRequested, JobSpec, JobSubmitted, Problem, ProblemError, Recorded, problem, subjects

from .fit import never_fits
from .identity import DIGEST, fingerprint, keyed_job_id, spec_hash
from .store import Views

SOURCE = "gateway"


@dataclass(frozen=True)
class Accepted:
    """`record` is the job's own first event when it was accepted before."""

    job_id: str
    seq: int
    record: Recorded | None = None

    @property
    def replayed(self) -> bool:
        return self.record is not None


async def submit(bus: Bus, views: Views, spec: JobSpec, code: str | None, key: str | None, principal: str) -> Accepted:
    """Append the job. Raises ProblemError when it can never run, or its key stands for another request."""
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
    refusal = await _refusal(bus, views, spec, code)
    if refusal is not None:
        # Accepted once is accepted, also when it would be refused by now.
        before = await _accepted_before(bus, event) if key else None
        if before is None:
            raise ProblemError(refusal)
        return before
    envelope = stamp(event, SOURCE, id=f"submitted:{job_id}", actor=principal)
    try:
        with span("submit job", {"job.id": job_id}):
            landed = await bus.log.append(envelope, Expect(event.subject(), 0))
    except Conflict:
        pass
    else:
        if not landed.duplicate:
            return Accepted(job_id, landed.seq)
    first = await _accepted_before(bus, event)
    if first is None:
        raise RuntimeError(f"the log holds {job_id} and does not show it")
    return first


async def _refusal(bus: Bus, views: Views, spec: JobSpec, code: str | None) -> Problem | None:
    if code is None and spec.code_source is not None:
        return problem("code_missing", "code_source is given, but no code blob was sent with the spec")
    if code is not None and not (DIGEST.fullmatch(code) and await bus.blobs.has(code)):
        told = f"There is no blob {code!r}; upload the code first with PUT /v1/blobs/<its SHA-256 in lower-case hex>"
        return problem("code_missing", told)
    return never_fits(spec, views.inventory())


async def _accepted_before(bus: Bus, event: JobSubmitted) -> Accepted | None:
    """What the key stands for, if it is in use. Raises ProblemError when that is another request."""
    first = await bus.log.last(event.subject())
    if first is None:
        return None
    if not isinstance(first.event, JobSubmitted) or first.event.fingerprint != event.fingerprint:
        told = f"The key {event.idempotency_key!r} stands for {event.job_id}, which was submitted with another body"
        raise ProblemError(problem("idempotency_key_reused", told, facts={"job_id": event.job_id}))
    return Accepted(event.job_id, first.seq, first)


async def cancel(bus: Bus, job_id: str, reason: str, principal: str) -> int:
    """Ask for the job's end. Asking twice is asking once."""
    event = CancelRequested(job_id=job_id, reason=reason)
    envelope = stamp(event, SOURCE, id=f"cancel:{job_id}", actor=principal)
    try:
        return (await bus.log.append(envelope, Expect(subjects.job_event(job_id, "cancel_requested"), 0))).seq
    except Conflict as conflict:
        return conflict.actual
