"""Accepting a job or an array of them: durable in the log before the answer, and the same answer for the same key."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker_chassis.clock import new_id, stamp
from stoker_chassis.eventlog import Conflict, Expect
from stoker_chassis.stores import Bus
from stoker_chassis.telemetry import span
from stoker_proto import Envelope, JobSpec, JobSubmitted, Problem, ProblemError, problem, subjects

from .admission import Read
from .identity import DIGEST, element_id, fingerprint, keyed_array_id, keyed_job_id, spec_hash
from .store import Views

SOURCE = "gateway"
AT_ONCE = 500  # appends on their way together: their round trips and the log's syncs are shared


@dataclass(frozen=True)
class Accepted:
    """What a submission stands for; `jobs` has one id when it is no array. `seq` is the last of its events."""

    jobs: Sequence[str]
    array_id: str | None
    seq: int
    replayed: bool


async def submit(bus: Bus, views: Views, read: Read, code: str | None, key: str | None, principal: str) -> Accepted:
    """Append the job, or every job of the array.

    The first one's event decides what the key stands for, and a repeated request appends what is missing of the rest.
    Raises ProblemError when the job is refused, or its key stands for another request.
    """
    spec = read.spec
    key = key or spec.idempotency_token
    array_id = _array_id(spec, principal, key)
    single = keyed_job_id(principal, key) if key else f"job-{new_id().lower()[-16:]}"
    jobs = [element_id(array_id, at) for at in range(spec.array.size)] if array_id and spec.array else [single]
    what, whole = spec_hash(spec, code), fingerprint(spec, code)

    def event(at: int) -> JobSubmitted:
        return JobSubmitted(
            job_id=jobs[at], spec=spec, spec_hash=what, code=code, idempotency_key=key, fingerprint=whole,
            array_id=array_id, array_index=at if array_id else None,
        )  # fmt: skip

    if key:
        await _not_the_other_kind(bus, views, array_id, principal, key)
    refusal = await _code_missing(bus, spec, code) or read.refusal
    with span("submit job", {"job.id": array_id or single}):
        seq, replayed = await _first(bus, event(0), refusal, principal)
        if len(jobs) > 1 and not replayed:
            # Nobody appends the rest before the first one lies, so it cannot be there from an earlier time.
            seq = await append_many(bus, (_sealed(event(at), principal) for at in range(1, len(jobs))))
        elif len(jobs) > 1:
            there = set(views.array(array_id)) if array_id else set()
            rest = (_sealed(event(at), principal) for at in range(1, len(jobs)) if jobs[at] not in there)
            seq = max(seq, await append_once(bus, rest))
    return Accepted(jobs, array_id, seq, replayed)


def _array_id(spec: JobSpec, principal: str, key: str | None) -> str | None:
    if spec.array is None:
        return None
    return keyed_array_id(principal, key) if key else f"array-{new_id().lower()[-16:]}"


def _sealed(event: JobSubmitted, principal: str) -> Envelope:
    return stamp(event, SOURCE, id=f"submitted:{event.job_id}", actor=principal)


async def _first(bus: Bus, event: JobSubmitted, refusal: Problem | None, principal: str) -> tuple[int, bool]:
    """Append the event that decides; its sequence, and whether it was there before."""
    if refusal is not None:
        # Accepted once is accepted, also when it would be refused by now.
        before = await _accepted_before(bus, event) if event.idempotency_key else None
        if before is None:
            raise ProblemError(refusal)
        return before, True
    try:
        landed = await bus.log.append(_sealed(event, principal), Expect(event.subject(), 0))
    except Conflict:
        pass
    else:
        if not landed.duplicate:
            return landed.seq, False
    first = await _accepted_before(bus, event)
    if first is None:
        raise RuntimeError(f"the log holds {event.job_id} and does not show it")
    return first, True


async def _code_missing(bus: Bus, spec: JobSpec, code: str | None) -> Problem | None:
    if code is None and spec.code_source is not None:
        return problem("code_missing", "code_source is given, but no code blob was sent with the spec")
    if code is not None and not (DIGEST.fullmatch(code) and await bus.blobs.has(code)):
        told = f"There is no blob {code!r}; upload the code first with PUT /v1/blobs/<its SHA-256 in lower-case hex>"
        return problem("code_missing", told)
    return None


async def _accepted_before(bus: Bus, event: JobSubmitted) -> int | None:
    """Where what the key stands for lies, if it is in use. Raises ProblemError when that is another request."""
    first = await bus.log.last(event.subject())
    if first is None:
        return None
    if not isinstance(first.event, JobSubmitted) or first.event.fingerprint != event.fingerprint:
        raise _reused(event.idempotency_key, event.array_id or event.job_id)
    return first.seq


async def _not_the_other_kind(bus: Bus, views: Views, array_id: str | None, principal: str, key: str) -> None:
    """Raises ProblemError when a key for an array stands for a single job, or the other way round."""
    job_id = keyed_job_id(principal, key)
    if array_id and await bus.log.last(subjects.job_event(job_id, "submitted")) is not None:
        raise _reused(key, job_id)
    other = keyed_array_id(principal, key)
    if not array_id and views.has_array(other):
        raise _reused(key, other)


def _reused(key: str | None, name: str) -> ProblemError:
    told = f"The key {key!r} stands for {name}, which was submitted with another body"
    return ProblemError(problem("idempotency_key_reused", told, facts={"job_id": name}))


async def append_many(bus: Bus, envelopes: Iterable[Envelope]) -> int:
    """Append events of which none depends on another, each once by its id; where the last one lies."""
    last, waiting = 0, iter(envelopes)
    while chunk := list(itertools.islice(waiting, AT_ONCE)):  # others have their turn in between
        last = max(at.seq for at in await bus.log.append_all(chunk))
    return last


async def append_once(bus: Bus, envelopes: Iterable[Envelope]) -> int:
    """The same for the only event on its subject: it finds itself there however long ago it was written."""

    async def one(envelope: Envelope) -> int:
        try:
            return (await bus.log.append(envelope, Expect(envelope.subject, 0))).seq
        except Conflict as conflict:
            return conflict.actual

    last, waiting = 0, iter(envelopes)
    while chunk := list(itertools.islice(waiting, AT_ONCE)):
        last = max(last, *(await asyncio.gather(*map(one, chunk))))
    return last
