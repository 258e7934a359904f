"""A scheduler that answers questions with what a test gave it, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from stoker_chassis.stores import Bus
from stoker_proto import (
    Displaced,
    ExplainAsked,
    Explained,
    Frozen,
    PlanAsked,
    Planned,
    Problem,
    QueueStatus,
    QueuesTold,
    Reason,
    WaitingShape,
    subjects,
)

NO_ROOM = Reason(
    code="no_room",
    message="8 GPUs are asked for, 2 are free",
    facts={"free": 2},
    blockers=("job-x",),
    actions=("wait",),
)
VICTIM = Displaced(
    job_id="job-v", queue="batch", priority_class="BEST_EFFORT", rule="higher_class", lost_gpu_seconds=120.4
)
PLANNED = Planned(
    seq=7, at_ms=1_000_000, starts="later", reasons=(NO_ROOM,), starts_ms=1_300_000, ahead=2, displaces=(VICTIM,)
)


def queue(name: str, parent: str | None = None, **more: Any) -> QueueStatus:
    fields: dict[str, Any] = {
        "weight": 1, "nominal": None, "limit": None, "lend": None, "used": 0, "borrowed": 0, "lent": 0,
        "active_jobs": 0, "waiting_jobs": 0, "waiting_gpus": 0, "share": 0, "past_gpu_hours": 0,
    }  # fmt: skip
    return QueueStatus(name=name, parent=parent, **(fields | more))


SHAPE = WaitingShape(
    shape="1 x GPU_8xH100", priority_class="NORMAL", jobs=3, gpus=24, first_job="job-a", waiting_ms=600_000,
    reason="no_room", message="8 GPUs [H100] are asked for, 2 are free",
)  # fmt: skip
QUEUES = QueuesTold(
    seq=7, at_ms=1_000_000, version=3, gpus=16, gpus_free=2, gpus_claimed=1.5,
    queues=(
        queue("research", nominal=8, limit=12, used=10.5, borrowed=2.5, active_jobs=4, share=656),
        queue("vision", "research", used=2, past_gpu_hours=12.34, waiting_jobs=3, waiting_gpus=24, shapes=(SHAPE,),
              used_by_model={"H100": 2}, window_open=False),
    ),
)  # fmt: skip


class SchedulerTwin:
    """`says` answers in place of what it knows, for every question."""

    def __init__(self, says: Frozen | bytes | None = None) -> None:
        self.says = says
        self.asked: list[ExplainAsked | PlanAsked | None] = []

    def explain(self, payload: bytes) -> bytes:
        asked = ExplainAsked.model_validate_json(payload)
        told = Explained(
            seq=9, at_ms=1_000_000, job_id=asked.job_id, state="queued", reasons=(NO_ROOM,), starts_ms=1_300_000,
            ahead=1, displaces=(VICTIM,),
        )  # fmt: skip
        return self._say(asked, told)

    def plan(self, payload: bytes) -> bytes:
        return self._say(PlanAsked.model_validate_json(payload), PLANNED)

    def queues(self, payload: bytes) -> bytes:
        assert payload == b""
        return self._say(None, QUEUES)

    def _say(self, asked: ExplainAsked | PlanAsked | None, known: Frozen) -> bytes:
        self.asked.append(asked)
        if isinstance(self.says, bytes):
            return self.says
        return (self.says or known).model_dump_json().encode()

    async def serve(self, bus: Bus) -> None:
        async with asyncio.TaskGroup() as tasks:
            for handler in (self.explain, self.plan, self.queues):
                subject = subjects.question("scheduler", handler.__name__)
                tasks.create_task(bus.questions.answer(subject, handler))

    @contextlib.asynccontextmanager
    async def on(self, bus: Bus) -> AsyncIterator[SchedulerTwin]:
        serving = asyncio.create_task(self.serve(bus))
        try:
            yield self
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


class Refusal(Frozen):
    """How the scheduler says no."""

    problem: Problem
