"""Events and log lines of a job as they come: gapless by cursor, and over only when nothing can follow."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from stoker_chassis.stores import Bus, Sample
from stoker_proto import Envelope, JobFinished, LogBatch, LogsSealed, Recorded, subjects

from .store import Views

HEARTBEAT_S = 15.0


def event_row(recorded: Recorded) -> dict[str, Any]:
    """One event as the API shows it: the CloudEvent and its place."""
    envelope: Envelope = recorded.envelope
    return {"seq": recorded.seq, "at_ms": recorded.at_ms} | envelope.model_dump(mode="json", exclude_none=True)


async def events(
    bus: Bus, views: Views, job_id: str | None, after: int, *, follow: bool
) -> AsyncIterator[Recorded | None]:
    """Events after a sequence, of one job or of the whole log. With `follow` new ones too; None is a heartbeat.

    A job's stream ends after JobFinished.
    """
    last, subject = after, subjects.job_events(job_id) if job_id else ">"
    while True:
        async for recorded in bus.log.read(last, subject):
            last = recorded.seq
            yield recorded
            if job_id and isinstance(recorded.event, JobFinished):
                return
        if not follow:
            return
        while not await _news(views, job_id, last):
            yield None


async def _news(views: Views, job_id: str | None, last: int) -> bool:
    """Wait for an event after `last`; false when a heartbeat is due first."""
    deadline = time.monotonic() + HEARTBEAT_S
    while (left := deadline - time.monotonic()) > 0:
        seen = views.seq
        if job_id is None:
            return await views.change(last, left)
        view = views.job(job_id)
        if view is not None and view.seq > last:
            return True
        await views.change(seen, left)
    return False


class LogLine(dict[str, Any]):
    """One line with its cursor, ready for JSON."""


def parse_cursor(cursor: str | None) -> tuple[int, int]:
    """`seq.index` of the last line seen, as (sequence to read after, lines of that batch to skip)."""
    if not cursor:
        return 0, 0
    seq, _, index = cursor.partition(".")
    return int(seq) - 1, int(index or 0) + 1


def lines_of(sample: Sample, rank: int | None) -> list[LogLine]:
    batch = LogBatch.model_validate_json(sample.payload)
    if rank is not None and batch.rank != rank:
        return []
    return [
        LogLine(
            cursor=f"{sample.seq}.{i}", attempt=batch.attempt, node=batch.node, rank=batch.rank, stream=batch.stream,
            number=batch.first + i, line=line,
        )
        for i, line in enumerate(batch.lines)
    ]  # fmt: skip


async def log_lines(
    bus: Bus, views: Views, job_id: str, cursor: str | None, rank: int | None, *, follow: bool
) -> AsyncIterator[LogLine | None]:
    """Lines after a cursor. With `follow` until the job is over and its last line was given; None is a heartbeat."""
    after, skip = parse_cursor(cursor)
    subject = subjects.logs(job_id)
    given, last = False, after
    if follow:
        async for sample in _until_final(bus, views, job_id, subject, after):
            if sample is None:
                yield None
                continue
            skip_now, skip = (skip, 0) if sample.seq == after + 1 else (0, 0)
            last = sample.seq
            for line in lines_of(sample, rank)[skip_now:]:
                given = True
                yield line
    async for sample in bus.telemetry.follow(subject, last, wait=False):
        skip_now, skip = (skip, 0) if sample.seq == after + 1 else (0, 0)
        for line in lines_of(sample, rank)[skip_now:]:
            given = True
            yield line
    if not given and cursor is None:
        async for line in sealed_lines(bus, job_id, rank):
            yield line


async def _until_final(bus: Bus, views: Views, job_id: str, subject: str, after: int) -> AsyncIterator[Sample | None]:
    """Samples as they come, until the job is final; what had not come by then is left to the caller."""
    samples = bus.telemetry.follow(subject, after)
    final = asyncio.create_task(_final(views, job_id))
    pending = asyncio.ensure_future(anext(samples))
    try:
        while True:
            done, _ = await asyncio.wait({pending, final}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if pending in done:
                yield pending.result()
                pending = asyncio.ensure_future(anext(samples))
            elif final in done:
                return
            elif not done:
                yield None
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
        await views.change(seen, HEARTBEAT_S)


async def sealed_lines(bus: Bus, job_id: str, rank: int | None) -> AsyncIterator[LogLine]:
    """Lines of a job whose telemetry has aged out, from its sealed streams."""
    async for recorded in bus.log.read(0, subjects.job_event(job_id, "logs_sealed")):
        event = recorded.event
        if not isinstance(event, LogsSealed):
            continue
        for stream in event.streams:
            name, _, kind = stream.stream.partition(".")
            number = int(name.removeprefix("rank-"))
            if kind == "metrics" or (rank is not None and number != rank):
                continue
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "stream"
                await bus.blobs.get(stream.digest, path)
                with path.open(errors="replace") as file:
                    for at, line in enumerate(file):
                        yield LogLine(
                            cursor=None, attempt=event.attempt, node=event.node, rank=number, stream=kind, number=at,
                            line=line.rstrip("\n"),
                        )  # fmt: skip
