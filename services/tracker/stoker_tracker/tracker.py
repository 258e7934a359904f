"""Follows the log and telemetry into MLflow. Write, then checkpoint: a kill repeats a little, which changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import Bus, Sample
from stoker_proto import (
    Event,
    JobFinished,
    JobSubmitted,
    LogsSealed,
    MetricBatch,
    MirrorCompleted,
    Point,
    Recorded,
    RunMirrored,
    subjects,
)
from stoker_proto.jobs import JobEvent

from .checkpoint import Checkpoint
from .mapping import Measured, ending, measured, new_run, update
from .mirror import Mirror, RunRef

MAX_SAMPLES = 500
SOURCE = "tracker"
log = logging.getLogger(__name__)


class Tracker:
    """One tracker; a second one beside it would do the same work, not other work."""

    def __init__(self, bus: Bus, mirror: Mirror, checkpoint: Checkpoint, batch_seconds: float) -> None:
        self._bus = bus
        self._mirror = mirror
        self._checkpoint = checkpoint
        self._batch_s = batch_seconds
        self._runs: dict[str, RunRef] = {}
        self._refused: dict[str, list[str]] = defaultdict(list)
        self._finding = asyncio.Lock()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_log())
            tasks.create_task(self._follow_metrics())

    async def _follow_log(self) -> None:
        async for recorded in self._bus.log.follow(self._checkpoint.progress.position):
            event = recorded.event
            if isinstance(event, JobSubmitted):
                await self._run_of(event.job_id)
            elif isinstance(event, JobFinished):
                await self._finish(event, recorded)
            elif isinstance(event, JobEvent):
                wanted = update(recorded)
                if wanted is not None:
                    run = await self._run_of(event.job_id)
                    self._refused[event.job_id] += await asyncio.to_thread(self._mirror.change, run.run_id, wanted)
            self._checkpoint.note(seq=recorded.seq, event_id=recorded.envelope.id)

    async def _run_of(self, job_id: str) -> RunRef:
        """The job's MLflow run, made at first need from the event that submitted the job."""
        async with self._finding:
            if job_id not in self._runs:
                recorded = await self._patient_last(subjects.job_event(job_id, "submitted"))
                event = recorded.event
                assert isinstance(event, JobSubmitted)
                run, refused = await asyncio.to_thread(self._mirror.ensure_run, job_id, new_run(event, recorded))
                self._refused[job_id] += refused
                self._runs[job_id] = run
                told = RunMirrored(job_id=job_id, experiment_id=run.experiment_id, run_id=run.run_id, url=run.url)
                await self._say(told, f"mirrored:{job_id}:{run.run_id}")
            return self._runs[job_id]

    async def _patient_last(self, subject: str) -> Recorded:
        while True:
            try:
                recorded = await self._bus.log.last(subject)
            except Unavailable as error:
                log.warning("%s", error)
                await asyncio.sleep(1)
                continue
            assert recorded is not None, f"nothing was ever published on {subject}"
            return recorded

    async def _say(self, event: Event, id: str) -> None:
        while True:
            try:
                await self._bus.log.append(stamp(event, SOURCE, id=id))
            except Unavailable as error:
                log.warning("%s", error)
            else:
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
            told = MetricBatch.model_validate_json(sample.payload)
            points[told.job_id] += measured(told.points)
        for job_id, mine in points.items():
            run = await self._run_of(job_id)
            self._refused[job_id] += await asyncio.to_thread(self._mirror.points, run.run_id, mine)

    async def _finish(self, event: JobFinished, recorded: Recorded) -> None:
        """All that the sealed streams hold goes in, whether telemetry brought it or not; the status comes last."""
        run = await self._run_of(event.job_id)
        history = [r async for r in self._bus.log.read(0, subjects.job_events(event.job_id))]
        count = 0
        for sealed in [r.event for r in history if isinstance(r.event, LogsSealed)]:
            count += await self._sealed(run, sealed)
        refused = await asyncio.to_thread(self._mirror.end, run.run_id, ending(event, recorded, history))
        rejects = tuple(dict.fromkeys([*self._refused.pop(event.job_id, []), *refused]))
        done = MirrorCompleted(job_id=event.job_id, run_id=run.run_id, points=count, rejects=rejects)
        await self._say(done, f"mirror-completed:{event.job_id}:{run.run_id}")
        self._runs.pop(event.job_id, None)

    async def _sealed(self, run: RunRef, sealed: LogsSealed) -> int:
        """One node's streams of one attempt: metric points and log files. Returns the number of points."""
        count = 0
        with tempfile.TemporaryDirectory() as folder:
            for stream in sealed.streams:
                file = Path(folder) / stream.stream
                await self._fetch(stream.digest, file)
                if stream.stream.endswith(".metrics"):
                    points = await asyncio.to_thread(read_points, file)
                    self._refused[sealed.job_id] += await asyncio.to_thread(self._mirror.points, run.run_id, points)
                    count += len(points)
                elif stream.bytes:
                    place = f"logs/attempt-{sealed.attempt}/{sealed.node}"
                    await asyncio.to_thread(self._mirror.artifact, run.run_id, file, place)
        return count

    async def _fetch(self, digest: str, into: Path) -> None:
        while True:
            try:
                await self._bus.blobs.get(digest, into)
            except Unavailable as error:
                log.warning("%s", error)
                await asyncio.sleep(1)
            else:
                return


def read_points(file: Path) -> list[Measured]:
    """The metric points of a sealed stream, each once; lines that are none are skipped."""
    points: dict[Measured, None] = {}
    with file.open(errors="replace") as lines:
        for line in lines:
            try:
                point = Point.model_validate(json.loads(line))
            except ValueError:
                continue
            points.setdefault(measured([point])[0])
    return list(points)
