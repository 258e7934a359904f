"""What the other nodes of a gang have said: folded from the log, asked by attempts that wait to start."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from stoker_chassis.eventlog import EventLog, Position
from stoker_proto import Assignment, AttemptPrepared, PreflightPassed, Recorded, subjects

from .plan import Rendezvous


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
