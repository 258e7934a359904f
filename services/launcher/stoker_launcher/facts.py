"""What the other nodes of a gang have said: folded from the log, asked by attempts that wait to start."""

from __future__ import annotations

import asyncio

from stoker_chassis.eventlog import EventLog, Position
from stoker_proto import Assignment, AttemptPrepared, PreflightFailed, PreflightPassed, Recorded, subjects

from .plan import Rendezvous


class Facts:
    """Prepared nodes and passed preflights of present attempts."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._prepared: dict[tuple[str, int], dict[str, AttemptPrepared]] = {}
        self._passed: set[tuple[str, int]] = set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> None:
        """Fold everything after a sequence, for ever. What lies before is caught up with by `learn`."""
        async for recorded in self._log.follow(Position(after)):
            self._fold(recorded)

    async def learn(self, assignment: Assignment) -> None:
        """Fold what was said of this attempt since it was placed."""
        async for recorded in self._log.read(assignment.fence - 1, subjects.job_events(assignment.job_id)):
            self._fold(recorded)

    def _fold(self, recorded: Recorded) -> None:
        event = recorded.event
        if isinstance(event, AttemptPrepared):
            self._prepared.setdefault((event.job_id, event.attempt), {})[event.node] = event
        elif isinstance(event, PreflightPassed):
            self._passed.add((event.job_id, event.attempt))
        elif not isinstance(event, PreflightFailed):
            return
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self) -> None:
        await self._news.wait()

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
        self._prepared.pop(key, None)
        self._passed.discard(key)
