"""Wires the scheduler: leads by lease, decides by the log, projects desired state, and answers questions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice

from stoker_chassis.clock import LogClock
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.hosting import host
from stoker_chassis.service import lead
from stoker_chassis.stores import Bus
from stoker_proto import ExplainAsked, Frozen, NodeAssignments, PlanAsked, Problem
from stoker_proto.subjects import question

from . import answers
from .board import Timing
from .core import Scheduler
from .desired import Desired
from .settings import SchedulerSettings

AT_ONCE = 256  # nodes whose desired state is on its way together
RETRY_S = 1.0
log = logging.getLogger(__name__)


class Projector:
    """Writes each node's desired state when it has changed; a new leader rewrites all of it.

    Nothing waits for the writing: when it is slower than the changes are, a node's next write holds several of them.
    """

    def __init__(self, bus: Bus, scheduler: Scheduler) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._desired = Desired()
        self._unwritten: dict[str, NodeAssignments] = {}
        self._news = asyncio.Event()

    async def after_fold(self, leading: bool) -> None:
        if not leading:
            self._desired, self._unwritten = Desired(), {}
            return
        changes = self._desired.changes(self._scheduler.state)
        if changes:
            self._unwritten |= changes
            self._news.set()
            await asyncio.sleep(0)  # first what nodes wait for, then the next decision

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unwritten:
                some = dict(islice(self._unwritten.items(), AT_ONCE))
                for name in some:
                    del self._unwritten[name]
                landed = await asyncio.gather(*(self._write(name) for name in some.values()), return_exceptions=True)
                failed = [(node, found) for node, found in zip(some, landed, strict=True) if found is not None]
                for node, found in failed:
                    if not isinstance(found, Unavailable):
                        raise found
                    self._unwritten.setdefault(node, some[node])
                if failed:
                    log.warning("desired state of %d nodes: %s", len(failed), failed[0][1])
                    await asyncio.sleep(RETRY_S)

    async def _write(self, wanted: NodeAssignments) -> None:
        await self._bus.assignments.put(wanted.node, wanted.model_dump_json().encode())


class Desk:
    """Answers questions from the present state; every scheduler can, the leader or not."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._clock = LogClock()

    def explain(self, payload: bytes) -> bytes:
        return _said(answers.explain(self._scheduler.cycle(self._now_ms()), ExplainAsked.model_validate_json(payload)))

    def plan(self, payload: bytes) -> bytes:
        return _said(answers.plan(self._scheduler.cycle(self._now_ms()), PlanAsked.model_validate_json(payload)))

    def queues(self, payload: bytes) -> bytes:
        return _said(answers.queues(self._scheduler.cycle(self._now_ms())))

    def _now_ms(self) -> int:
        self._clock.saw(self._scheduler.state.at_ms)
        return self._clock.now_ms()


def _said(answer: Frozen | Problem) -> bytes:
    if isinstance(answer, Problem):
        return b'{"problem":' + answer.model_dump_json(exclude_none=True).encode() + b"}"
    return answer.model_dump_json().encode()


async def serve(bus: Bus, ready: Callable[[], None], settings: SchedulerSettings) -> None:
    timing = Timing(
        fresh_ms=int(settings.preflight_fresh_seconds * 1000),
        start_deadline_ms=int(settings.start_deadline_seconds * 1000),
        fence_ms=int(settings.fence_after_seconds * 1000),
    )
    scheduler = Scheduler(timing, check_every=settings.check_invariants_every)
    projector, desk = Projector(bus, scheduler), Desk(scheduler)
    ready()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(projector.run())
        tasks.create_task(
            lead(
                bus,
                "scheduler",
                settings.instance,
                scheduler,
                after_fold=projector.after_fold,
                snapshots=bus.snapshots,
                snapshot_every=settings.snapshot_every,
            )
        )
        for verb, handler in (("explain", desk.explain), ("plan", desk.plan), ("queues", desk.queues)):
            tasks.create_task(bus.questions.answer(question("scheduler", verb), handler))


def main() -> None:
    settings = SchedulerSettings()
    host("scheduler", settings, lambda bus, ready: serve(bus, ready, settings))


if __name__ == "__main__":
    main()
