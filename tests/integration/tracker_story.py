"""Jobs as the other services would tell them: events, telemetry and sealed streams of a job with two attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker_chassis.clock import stamp
from stoker_chassis.stores import Bus
from stoker_proto import (
    Allocation,
    AttemptPlaced,
    AttemptStarted,
    Event,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    LogsSealed,
    MetricBatch,
    MirrorCompleted,
    Point,
    SealedStream,
    problem,
    subjects,
)
from tests.builders import spec
from tests.waiting import until

BEGAN_MS = 1_800_000_000_000


class Story:
    """One job's life on a bus. `lossy` leaves every second metric batch out of telemetry."""

    def __init__(self, bus: Bus, folder: Path, job_id: str, *, experiment: str = "exp", lossy: bool = False) -> None:
        self.bus, self.job_id = bus, job_id
        self._folder, self._experiment, self._lossy = folder, experiment, lossy
        self._told = 0
        folder.mkdir(parents=True, exist_ok=True)

    async def tell(self, *events: Event) -> None:
        for event in events:
            self._told += 1
            await self.bus.log.append(stamp(event, "test", id=f"{self.job_id}:{self._told}"))

    async def submit(self, **spec_fields: Any) -> None:
        fields: dict[str, Any] = {"parameters": {"lr": 3e-4, "opt": {"name": "adamw"}, "hits@10": 1}}
        made = spec(**(fields | spec_fields)).model_copy(update={"experiment_name": self._experiment})
        await self.tell(JobSubmitted(job_id=self.job_id, spec=made, spec_hash="h"))

    async def place(self, attempt: int, resume_step: int | None = None) -> None:
        held = Allocation(node="n1", boot_epoch="b", gpus=("g",), node_rank=0)
        fence = 10 * attempt
        await self.tell(
            AttemptPlaced(job_id=self.job_id, attempt=attempt, fence=fence, allocations=(held,), preflight="fresh"),
            AttemptStarted(
                job_id=self.job_id, attempt=attempt, node="n1", fence=fence, ranks=(0,), resume_step=resume_step
            ),
        )

    def points(self, attempt: int, steps: range) -> list[Point]:
        """A loss that turns NaN, then infinite, and a point at step 0."""
        values: list[Point] = []
        for step in steps:
            at_ms = BEGAN_MS + attempt * 1_000_000 + step * 10
            value: float | str = {7: "NaN", 8: "Infinity"}.get(step, 2.0 / (step + 1))
            values.append(Point(key="train/loss", value=value, step=step, time_ms=at_ms))
            values.append(Point(key="hits@10", value=step / 100, step=step, time_ms=at_ms))
        return values

    async def measure(self, attempt: int, points: list[Point], batch: int = 5) -> None:
        for first in range(0, len(points), batch):
            if self._lossy and first // batch % 2:
                continue
            told = MetricBatch(
                job_id=self.job_id, attempt=attempt, rank=0, first=first, points=tuple(points[first : first + batch])
            )
            subject = subjects.metric(self.job_id, attempt)
            key = f"{self.job_id}:{attempt}:{first}"
            await self.bus.telemetry.publish(subject, told.model_dump_json().encode(), key)

    async def seal(self, attempt: int, points: list[Point]) -> None:
        texts = {
            "rank-0.metrics": "".join(json.dumps(p.model_dump()) + "\n" for p in points) + "not a point\n",
            "rank-0.stdout": f"attempt {attempt}\ndone\n",
            "rank-0.stderr": "",
        }
        streams = []
        for name, text in texts.items():
            file = self._folder / f"{self.job_id}-{attempt}-{name}"
            file.write_text(text)
            digest = await self.bus.blobs.put(file)
            streams.append(SealedStream(stream=name, digest=digest, lines=text.count("\n"), bytes=len(text)))
        sealed = LogsSealed(
            job_id=self.job_id, attempt=attempt, node="n1", fence=10 * attempt, streams=tuple(streams)
        )  # fmt: skip
        await self.tell(sealed)

    async def requeue(self, attempt: int, outcome: Any = "infra_gpu", cause: str = "XID 79") -> None:
        await self.tell(JobRequeued(job_id=self.job_id, attempt=attempt, outcome=outcome, cause=cause))

    async def finish(self, state: Any = "succeeded", attempts: int = 2) -> None:
        trouble = None if state == "succeeded" else problem("exit_code", "it ended with code 3")
        outcome: Any = "ok" if state == "succeeded" else "user_error"
        await self.tell(
            JobFinished(
                job_id=self.job_id, state=state, outcome=outcome, attempts=attempts, gpu_ms=360_000, problem=trouble
            )
        )

    async def whole(self, state: Any = "succeeded", steps: int = 40) -> None:
        """Submitted, interrupted, resumed and finished."""
        await self.submit()
        for attempt, span in ((1, range(steps // 2 + 5)), (2, range(steps // 2, steps))):
            await self.place(attempt, None if attempt == 1 else steps // 2)
            points = self.points(attempt, span)
            await self.measure(attempt, points)
            await self.seal(attempt, points)
            if attempt == 1:
                await self.requeue(1)
        await self.finish(state)

    async def mirrored(self, seconds: float = 60) -> MirrorCompleted:
        """What the tracker says once MLflow holds the whole job."""
        subject = subjects.job_event(self.job_id, MirrorCompleted.verb)

        async def told() -> bool:
            return await self.bus.log.last(subject) is not None

        await until(told, seconds)
        last = await self.bus.log.last(subject)
        assert last and isinstance(last.event, MirrorCompleted)
        return last.event
