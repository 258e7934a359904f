"""Events and log lines of a job as they come: gapless by cursor, and over only when nothing can follow."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from stoker_chassis.eventlog import Position
from stoker_chassis.stores import Bus, Sample
from stoker_proto import JobFinished, LogBatch, LogsSealed, Recorded, SealedStream, subjects

from .store import Views

LOOK_S = 30.0
CURSOR = re.compile(r"([1-9][0-9]{0,17})\.([0-9]{1,9})")
Line = dict[str, Any]
Part = tuple[int, str, int, str]  # attempt, node, rank, stream


def event_row(recorded: Recorded) -> dict[str, Any]:
    """One event as the API shows it: the CloudEvent and its place."""
    return {"seq": recorded.seq, "at_ms": recorded.at_ms} | recorded.envelope.model_dump(mode="json", exclude_none=True)


async def job_events(bus: Bus, views: Views, job_id: str, after: int) -> AsyncIterator[Recorded]:
    """The job's events after a sequence, as they come, up to JobFinished."""
    last = after
    while True:
        view = views.job(job_id)
        seen, over = (view.seq, view.final) if view else (0, False)
        async for recorded in bus.log.read(last, subjects.job_events(job_id)):
            last = recorded.seq
            yield recorded
            if isinstance(recorded.event, JobFinished):
                return
        if over:
            return
        await _moved(views, job_id, seen)


async def _moved(views: Views, job_id: str, seen: int) -> None:
    """Wait for anything about the job after what was seen."""
    while True:
        at = views.seq
        view = views.job(job_id)
        if view is not None and view.seq > seen:
            return
        await views.change(at, LOOK_S)


async def all_events(bus: Bus, after: int) -> AsyncIterator[Recorded]:
    """Every event after a sequence, for ever."""
    async for recorded in bus.log.follow(Position(after)):
        yield recorded


def parse_cursor(cursor: str | None) -> tuple[int, int]:
    """`seq.index` of the last line seen, as (sequence to read after, lines to skip there). Raises ValueError."""
    if not cursor:
        return 0, 0
    match = CURSOR.fullmatch(cursor)
    if match is None:
        raise ValueError(cursor)
    return int(match[1]) - 1, int(match[2]) + 1


async def log_lines(
    bus: Bus, views: Views, job_id: str, cursor: str | None, rank: int | None, *, follow: bool
) -> AsyncIterator[Line]:
    """Lines after a cursor, from the very first without one. With `follow` until the job's last line was given."""
    if not cursor:
        async for line in _forgotten(bus, job_id, rank):
            yield line
    async for line in _live(bus, views, job_id, cursor, rank, follow=follow):
        yield line


async def last_lines(
    bus: Bus, views: Views, job_id: str, cursor: str | None, rank: int | None, count: int, *, follow: bool
) -> AsyncIterator[Line]:
    """The last lines that there are now, and with `follow` those that come after them."""
    kept: deque[Line] = deque(maxlen=count)
    async for line in log_lines(bus, views, job_id, cursor, rank, follow=False):
        kept.append(line)
        cursor = line["cursor"] or cursor
    for line in kept:
        yield line
    if follow:
        async for line in _live(bus, views, job_id, cursor, rank, follow=True):
            yield line


async def _live(
    bus: Bus, views: Views, job_id: str, cursor: str | None, rank: int | None, *, follow: bool
) -> AsyncIterator[Line]:
    after, skip = parse_cursor(cursor)
    async for sample in _samples(bus, views, job_id, after, follow=follow):
        lines = lines_of(sample, rank)
        for line in lines[skip:] if sample.seq == after + 1 else lines:
            yield line


def lines_of(sample: Sample, rank: int | None) -> list[Line]:
    batch = LogBatch.model_validate_json(sample.payload)
    if rank is not None and batch.rank != rank:
        return []
    part = (batch.attempt, batch.node, batch.rank, batch.stream)
    return [_line(part, batch.first + i, line, f"{sample.seq}.{i}") for i, line in enumerate(batch.lines)]


def _line(part: Part, number: int, line: str, cursor: str | None) -> Line:
    attempt, node, rank, stream = part
    return {
        "cursor": cursor, "attempt": attempt, "node": node, "rank": rank, "stream": stream, "number": number,
        "line": line,
    }  # fmt: skip


async def _samples(bus: Bus, views: Views, job_id: str, after: int, *, follow: bool) -> AsyncIterator[Sample]:
    """Log batches after a sequence: those that come until the job is final, then those that had come by then."""
    subject, last = subjects.logs(job_id), after
    if follow:
        async for sample in _until_final(bus, views, job_id, subject, last):
            last = sample.seq
            yield sample
    async for sample in bus.telemetry.follow(subject, last, wait=False):
        yield sample


async def _until_final(bus: Bus, views: Views, job_id: str, subject: str, after: int) -> AsyncGenerator[Sample]:
    samples = bus.telemetry.follow(subject, after)
    final = asyncio.create_task(_final(views, job_id))
    pending = asyncio.ensure_future(anext(samples))
    try:
        while True:
            done, _ = await asyncio.wait({pending, final}, return_when=asyncio.FIRST_COMPLETED)
            if pending in done:
                yield pending.result()
                pending = asyncio.ensure_future(anext(samples))
            else:
                return
    finally:
        final.cancel()
        pending.cancel()
        await asyncio.gather(final, pending, return_exceptions=True)


async def _final(views: Views, job_id: str) -> None:
    while True:
        seen = views.seq
        view = views.job(job_id)
        if view is None or view.final:
            return
        await views.change(seen, LOOK_S)


async def _forgotten(bus: Bus, job_id: str, rank: int | None) -> AsyncIterator[Line]:
    """What telemetry no longer holds of streams that have ended, from their sealed copies."""
    sealed = await _sealed(bus, job_id, rank)
    begins: dict[Part, int] = {}
    if sealed:
        samples = bus.telemetry.follow(subjects.logs(job_id), 0, wait=False)
        async with contextlib.aclosing(samples):  # type: ignore[type-var]
            async for sample in samples:
                batch = LogBatch.model_validate_json(sample.payload)
                begins.setdefault((batch.attempt, batch.node, batch.rank, batch.stream), batch.first)
                if sealed.keys() <= begins.keys():
                    break
    for part in sorted(sealed):
        upto = begins.get(part)
        if upto != 0:
            async for line in _sealed_lines(bus, part, sealed[part], upto):
                yield line


async def _sealed(bus: Bus, job_id: str, rank: int | None) -> dict[Part, SealedStream]:
    found: dict[Part, SealedStream] = {}
    async for recorded in bus.log.read(0, subjects.job_event(job_id, "logs_sealed")):
        event = recorded.event
        if not isinstance(event, LogsSealed):
            continue
        for stream in event.streams:
            name, _, kind = stream.stream.partition(".")
            number = int(name.removeprefix("rank-"))
            if kind != "metrics" and stream.bytes and rank in (None, number):
                found[event.attempt, event.node, number, kind] = stream
    return found


async def _sealed_lines(bus: Bus, part: Part, stream: SealedStream, upto: int | None) -> AsyncIterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        try:
            await bus.blobs.get(stream.digest, path)
        except KeyError:
            told = f"[{stream.lines} lines are gone: their copy {stream.digest} is not in the blob store]"
            yield _line(part, 0, told, None)
            return
        # Universal newlines: a carriage return ends a line here as it does in telemetry.
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                if number == upto:
                    return
                yield _line(part, number, line.rstrip("\n"), None)
