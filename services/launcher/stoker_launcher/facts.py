"""What the other nodes of a gang have said: folded from the log, asked by attempts that wait to start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Literal

from stoker_chassis.eventlog import EventLog, Position, Unavailable
from stoker_proto import Assignment, AttemptPrepared, PreflightPassed, Recorded, subjects

from .plan import Rendezvous

log = logging.getLogger(__name__)


class Facts:
    """Prepared nodes and passed preflights of present attempts."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._wanted: set[tuple[str, int]] = set()
        self._prepared: dict[tuple[str, int], dict[str, AttemptPrepared]] = {}
        self._passed: set[tuple[str, int]] = set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> None:
        """Fold everything after a sequence, for ever. What lies before is caught up with by `learn`."""
        async for recorded in self._log.follow(Position(after)):
            self._fold(recorded)

    async def learn(self, assignment: Assignment) -> None:
        """Fold what was said of this attempt since it was placed, and from now on."""
        self._wanted.add((assignment.job_id, assignment.attempt))
        async for recorded in self._log.read(assignment.fence - 1, subjects.job_events(assignment.job_id)):
            self._fold(recorded)

    def _fold(self, recorded: Recorded) -> None:
        event = recorded.event
        if not isinstance(event, AttemptPrepared | PreflightPassed):
            return
        key = (event.job_id, event.attempt)
        if key not in self._wanted:
            return
        if isinstance(event, AttemptPrepared):
            self._prepared.setdefault(key, {})[event.node] = event
        else:
            self._passed.add(key)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def meeting(self, assignment: Assignment, stop: asyncio.Event) -> Rendezvous | None:
        """The gang's rendezvous as soon as it may start; None when it is to stop before."""
        stopped = asyncio.create_task(stop.wait())
        try:
            await self._learn_surely(assignment, stop)
            while not stop.is_set():
                news = asyncio.create_task(self.news())
                meet = self.rendezvous(assignment)
                if meet is not None:
                    news.cancel()
                    return meet
                await asyncio.wait([news, stopped], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            return None
        finally:
            stopped.cancel()

    async def _learn_surely(self, assignment: Assignment, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self.learn(assignment)
            except Unavailable as error:
                log.warning("%s/%d: %s", assignment.job_id, assignment.attempt, error)
                await asyncio.sleep(0.5)
            else:
                return

    def news(self) -> Coroutine[Any, Any, Literal[True]]:
        """What to await for news after this call, also when they come before the awaiting begins."""
        return self._news.wait()

    def rendezvous(self, assignment: Assignment) -> Rendezvous | None:
        """The gang's rendezvous once every node is prepared and the preflight has passed or is fresh."""
        key = (assignment.job_id, assignment.attempt)
        if assignment.preflight == "required" and key not in self._passed:
            return None
        prepared = {n: p for n, p in self._prepared.get(key, {}).items() if p.fence == assignment.fence}
        if any(a.node not in prepared for a in assignment.allocations):
            return None
        head = prepared[assignment.head.node]
        if head.master_addr is None or head.master_port is None:
            return None
        return Rendezvous(head.master_addr, head.master_port, head.resume_path, head.resume_step)

    def forget(self, assignment: Assignment) -> None:
        key = (assignment.job_id, assignment.attempt)
        self._wanted.discard(key)
        self._prepared.pop(key, None)
        self._passed.discard(key)
