"""Wires the scheduler: leads by lease, decides by the log, projects desired state for the launchers."""

from __future__ import annotations

from collections.abc import Callable

from stoker_chassis.hosting import host
from stoker_chassis.service import lead
from stoker_chassis.stores import Bus
from stoker_proto import NodeAssignments

from .core import Scheduler
from .cycle import Timing
from .desired import desired
from .settings import SchedulerSettings


class Projector:
    """Writes each node's desired state when it has changed; a new leader rewrites all of it."""

    def __init__(self, bus: Bus, scheduler: Scheduler) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._written: dict[str, NodeAssignments] = {}

    async def after_fold(self, leading: bool) -> None:
        if not leading:
            self._written.clear()
            return
        for node, wanted in desired(self._scheduler.state).items():
            before = self._written.get(node)
            if before is None or before.attempts != wanted.attempts:
                await self._bus.assignments.put(node, wanted.model_dump_json().encode())
                self._written[node] = wanted


async def serve(bus: Bus, ready: Callable[[], None], settings: SchedulerSettings) -> None:
    timing = Timing(
        fresh_ms=int(settings.preflight_fresh_seconds * 1000),
        start_deadline_ms=int(settings.start_deadline_seconds * 1000),
        fence_ms=int(settings.fence_after_seconds * 1000),
    )
    scheduler = Scheduler(timing)
    projector = Projector(bus, scheduler)
    ready()
    await lead(bus, "scheduler", settings.instance, scheduler, after_fold=projector.after_fold)


def main() -> None:
    settings = SchedulerSettings()
    host("scheduler", settings, lambda bus, ready: serve(bus, ready, settings))


if __name__ == "__main__":
    main()
