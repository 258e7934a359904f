"""Follows the log and telemetry into MLflow. Write, then checkpoint: a kill repeats a little, which changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Conflict, Diverged, Expect, Unavailable
from stoker_chassis.stores import Bus, Sample
from stoker_proto import (
    Event,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    LogsSealed,
    MetricBatch,
    MirrorCompleted,
    Point,
    Recorded,
    RunMirrored,
    SealedStream,
    subjects,
)
from stoker_proto.jobs import JobEvent

from .checkpoint import Checkpoint
from .mapping import Measured, Update, ending, measured, new_run, preemptions, update
from .mirror import METRICS_A_BATCH, Mirror, Refused, RunRef

MAX_SAMPLES, MAX_REJECTS = 500, 20
SOURCE = "tracker"
log = logging.getLogger(__name__)
T = TypeVar("T")


class Tracker:
    """One tracker; a second one beside it would do the same work, not other work."""

    def __init__(self, bus: Bus, mirror: Mirror, checkpoint: Checkpoint, batch_seconds: float) -> None:
        self._bus = bus
        self._mirror = mirror
        self._checkpoint = checkpoint
        self._batch_s = batch_seconds
        self._runs: dict[str, RunRef | None] = {}
        self._refused: dict[str, list[str]] = defaultdict(list)
        self._finding = asyncio.Lock()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_log())
                tasks.create_task(self._follow_metrics())
        finally:
            self._mirror.close()

    async def _follow_log(self) -> None:
        while True:
            try:
                async for recorded in self._bus.log.follow(self._checkpoint.progress.position):
                    await self._fold(recorded)
                    self._checkpoint.note(seq=recorded.seq, event_id=recorded.envelope.id)
            except Diverged as error:
                log.warning("another log than before (%s): mirroring it from its start", error)
                self._checkpoint.note(seq=0, event_id="")

    async def _fold(self, recorded: Recorded) -> None:
        event = recorded.event
        if isinstance(event, JobFinished):
            await self._finish(event, recorded)
        elif isinstance(event, LogsSealed):
            await self._late(event, recorded)
        elif isinstance(event, JobEvent):
            wanted = update(recorded)
            if wanted and isinstance(event, JobRequeued) and event.outcome == "preempted":
                count = preemptions(await patiently(lambda: self._history(event.job_id, recorded.seq + 1)))
                wanted = replace(wanted, tags=(*wanted.tags, ("stoker.preemptions", str(count))))
            run = await self._run_of(event.job_id) if wanted else None
            if run and wanted:
                await self._change(event.job_id, run, wanted)

    async def _change(self, job_id: str, run: RunRef, wanted: Update) -> None:
        self._reject(job_id, await asyncio.to_thread(self._mirror.change, run.run_id, wanted))

    def _reject(self, job_id: str, refused: list[str]) -> None:
        if refused:
            log.warning("job %s: MLflow refused %s", job_id, refused)
            self._refused[job_id] += refused

    async def _run_of(self, job_id: str) -> RunRef | None:
        """The job's MLflow run, made at first need from the event of its submission; None when it cannot have one."""
        async with self._finding:
            if job_id not in self._runs:
                submitted = await patiently(lambda: self._bus.log.last(subjects.job_event(job_id, JobSubmitted.verb)))
                self._runs[job_id] = await self._ensure(submitted) if submitted else None
            return self._runs[job_id]

    async def _ensure(self, submitted: Recorded) -> RunRef | None:
        event = submitted.event
        assert isinstance(event, JobSubmitted)
        try:
            run, refused = await asyncio.to_thread(self._mirror.ensure_run, event.job_id, new_run(event, submitted))
        except Refused as error:
            log.error("job %s gets no MLflow run: %s", event.job_id, error)
            return None
        self._reject(event.job_id, refused)
        told = RunMirrored(job_id=event.job_id, experiment_id=run.experiment_id, run_id=run.run_id, url=run.url)
        await self._say(told, f"mirrored:{event.job_id}:{run.run_id}")
        return run

    async def _say(self, event: Event, id: str) -> None:
        """Publish once, however long ago it was said first: the log itself forgets ids after minutes."""
        while True:
            last = await patiently(lambda: self._bus.log.last(event.subject()))
            if last and last.envelope.id == id:
                return
            expect = Expect(event.subject(), last.seq if last else 0)
            try:
                await patiently(partial(self._bus.log.append, stamp(event, SOURCE, id=id), expect))
            except Conflict:
                continue
            return

    async def _follow_metrics(self) -> None:
        """Metric points as they come, in batches; the cursor moves once they are in MLflow."""
        batch: list[Sample] = []
        began = time.monotonic()
        arriving = self._bus.telemetry.follow("stoker.metric.>", self._checkpoint.progress.samples)
        pending = asyncio.ensure_future(anext(arriving))
        while True:
            left = self._batch_s - (time.monotonic() - began) if batch else None
            done, _ = await asyncio.wait({pending}, timeout=None if left is None else max(0.0, left))
            if done:
                if not batch:
                    began = time.monotonic()
                batch.append(pending.result())
                pending = asyncio.ensure_future(anext(arriving))
            if batch and (len(batch) >= MAX_SAMPLES or time.monotonic() - began >= self._batch_s):
                await self._log_samples(batch)
                self._checkpoint.note(samples=batch[-1].seq)
                batch = []

    async def _log_samples(self, samples: list[Sample]) -> None:
        points: dict[str, list[Measured]] = defaultdict(list)
        for sample in samples:
            try:
                told = MetricBatch.model_validate_json(sample.payload)
            except ValueError as error:
                log.warning("%s holds no metric points: %s", sample.subject, error)
                continue
            points[told.job_id] += measured(told.points)
        for job_id, mine in points.items():
            run = await self._run_of(job_id)
            if run:
                self._reject(job_id, await asyncio.to_thread(self._mirror.points, run.run_id, mine))

    async def _finish(self, event: JobFinished, recorded: Recorded) -> None:
        """All that the sealed streams hold goes in, whether telemetry brought it or not; the status comes last."""
        run = await self._run_of(event.job_id)
        if run is None:
            return
        history = await patiently(lambda: self._history(event.job_id, recorded.seq))
        sealed = {(r.event.attempt, r.event.node): r.event for r in history if isinstance(r.event, LogsSealed)}
        count = 0
        for logs in sealed.values():
            count += await self._sealed(run, logs)
        self._reject(
            event.job_id,
            await asyncio.to_thread(self._mirror.end, run.run_id, ending(event, recorded, history)),
        )
        rejects = list(dict.fromkeys(self._refused.pop(event.job_id, [])))
        if len(rejects) > MAX_REJECTS:
            rejects[MAX_REJECTS:] = [f"and {len(rejects) - MAX_REJECTS} more"]
        done = MirrorCompleted(job_id=event.job_id, run_id=run.run_id, points=count, rejects=tuple(rejects))
        await self._say(done, f"mirror-completed:{event.job_id}:{run.run_id}")
        self._runs.pop(event.job_id, None)

    async def _history(self, job_id: str, until: int) -> list[Recorded]:
        return [r async for r in self._bus.log.read(0, subjects.job_events(job_id)) if r.seq < until]

    async def _late(self, event: LogsSealed, recorded: Recorded) -> None:
        """Streams that were sealed after the job had ended, which nobody waited for."""
        finished = await patiently(lambda: self._bus.log.last(subjects.job_event(event.job_id, JobFinished.verb)))
        run = await self._run_of(event.job_id) if finished and finished.seq < recorded.seq else None
        if run:
            await self._sealed(run, event)

    async def _sealed(self, run: RunRef, sealed: LogsSealed) -> int:
        """One node's streams of one attempt: metric points and log files. Returns the number of points."""
        count = 0
        with tempfile.TemporaryDirectory() as folder:
            for stream in sealed.streams:
                if not stream.bytes:
                    continue
                file = Path(folder) / Path(stream.stream).name
                try:
                    await patiently(partial(self._bus.blobs.get, stream.digest, file))
                except KeyError:
                    self._reject(sealed.job_id, [f"{stream.stream} of {sealed.node}: blob {stream.digest} is missing"])
                    continue
                count += await self._stream(run, sealed, stream, file)
                file.unlink()
        return count

    async def _stream(self, run: RunRef, sealed: LogsSealed, stream: SealedStream, file: Path) -> int:
        if not stream.stream.endswith(".metrics"):
            place = f"logs/attempt-{sealed.attempt}/{sealed.node}"
            self._reject(sealed.job_id, await asyncio.to_thread(self._mirror.artifact, run.run_id, file, place))
            return 0
        count = 0
        points = read_points(file)
        while batch := await asyncio.to_thread(lambda: list(islice(points, METRICS_A_BATCH))):
            self._reject(sealed.job_id, await asyncio.to_thread(self._mirror.points, run.run_id, batch))
            count += len(batch)
        return count


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The call's answer, however long the log or the blobs are away."""
    while True:
        try:
            return await call()
        except Unavailable as error:
            log.warning("trying again: %s", error)
            await asyncio.sleep(1)


def read_points(file: Path) -> Iterator[Measured]:
    """The metric points of a sealed stream; lines that are none are skipped."""
    with file.open(errors="replace") as lines:
        for line in lines:
            try:
                point = Point.model_validate(json.loads(line))
            except ValueError:
                continue
            yield measured([point])[0]
