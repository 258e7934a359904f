"""The one loop under every deciding service: gather, evolve, decide, append.

Standby   folds the log and tries for the lease.
Elected   holds the lease; appends LeaderElected and waits to read it back, so that everything decided by the leader
          before is folded first.
Leading   decides at each piece of news and at each due time; after an append it reads its own events back before it
          decides again. A Conflict means somebody wrote first: fold on and decide again. Losing the lease: Standby.

The lease only saves work. What keeps a stale leader out is the guard on each decision, checked by the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

from stoker_proto import Envelope, Event, LeaderElected, Recorded

from .clock import LogClock, stamp
from .eventlog import START, Burst, Conflict, Expect, Position, Unavailable
from .resume import EVERY, Keeper, Snapshotting, resume
from .stores import Bus, Snapshots
from .telemetry import span

LEASE_TTL_S = 3
RENEW_S = 1.0
RETRY_S = 1.0
HELD = 2_000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """An event to append: guarded by `expect`, and under `id` when re-sending it must not write it twice."""

    event: Event
    expect: Expect | None = None
    id: str | None = None


class Core(Protocol):
    """The pure part of a deciding service."""

    def evolve(self, recorded: Recorded) -> None: ...

    def decide(self, now_ms: int) -> list[Decision]:
        """What to append now. Called again until it says nothing more."""
        ...

    def due_ms(self, now_ms: int) -> int | None:
        """The next moment on the log's clock at which deciding could matter without news; None: never."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A core that folds events of some types only; the others are counted, but not even decoded."""

    @property
    def wants(self) -> frozenset[str]: ...


class _Leadership:
    """Keeps trying for the lease; `held` says whether this process has it."""

    def __init__(self, bus: Bus, service: str, holder: str, wake: asyncio.Event) -> None:
        self._bus = bus
        self._service = service
        self._holder = holder
        self._wake = wake
        self.held = False

    async def keep(self) -> None:
        """Renew for ever. An answer that does not come in time counts as a lost lease."""
        try:
            while True:
                try:
                    async with asyncio.timeout(LEASE_TTL_S - RENEW_S):
                        held = await self._bus.lease.acquire(self._service, self._holder, LEASE_TTL_S)
                except (TimeoutError, Unavailable):
                    held = False
                if held != self.held:
                    self.held = held
                    self._wake.set()
                await asyncio.sleep(RENEW_S)
        finally:
            self.held = False
            with contextlib.suppress(TimeoutError, Unavailable):
                async with asyncio.timeout(1):
                    await self._bus.lease.release(self._service, self._holder)


class _Reader:
    """Follows the log into a bounded buffer, so that the loop can take bursts and also wait for other things."""

    def __init__(self, bus: Bus, start: Position, wants: frozenset[str] | None, wake: asyncio.Event) -> None:
        self._bus = bus
        self._start = start
        self._wants = wants
        self._wake = wake
        self._room = asyncio.Event()
        self._held = 0
        self.buffer: list[Burst] = []

    async def run(self) -> None:
        async for burst in self._bus.log.bursts(self._start, self._wants):
            self.buffer.append(burst)
            self._held += len(burst.recorded)
            self._wake.set()
            while self._held >= HELD:
                self._room.clear()
                await self._room.wait()

    def take(self) -> list[Burst]:
        taken, self.buffer, self._held = self.buffer, [], 0
        self._room.set()
        return taken


async def lead(
    bus: Bus,
    service: str,
    holder: str,
    core: Core,
    *,
    after_fold: Callable[[bool], Awaitable[None]] | None = None,
    poll_s: float | None = None,
    snapshots: Snapshots | None = None,
    snapshot_every: int = EVERY,
) -> None:
    """Fold the log for ever and, while holding the lease of `service`, decide.

    `after_fold(leading)` runs after each burst of events once the log's end was reached; when it raises Unavailable, it
    runs again a second later and before anything is decided. `poll_s` makes the core decide at least that often, for
    cores that look at more than the log. With `snapshots`, a core that is `Snapshotting` starts from the newest one
    that fits, and the leader saves one every `snapshot_every` events and when it stops.
    """
    start, keeper = START, None
    if snapshots is not None and isinstance(core, Snapshotting):
        start = await resume(bus.log, snapshots, service, core)
        keeper = Keeper(snapshots, service, core, start, snapshot_every)
    wake = asyncio.Event()
    wake.set()  # all may be known already
    leadership = _Leadership(bus, service, holder, wake)
    reader = _Reader(bus, start, core.wants if isinstance(core, Selective) else None, wake)
    tasks = [asyncio.create_task(leadership.keep()), asyncio.create_task(reader.run())]
    for task in tasks:
        task.add_done_callback(lambda _: wake.set())
    loop = _Loop(bus, f"{service}/{holder}", core, LogClock(), barrier=await bus.log.end(), at=start)
    stopped = False
    try:
        while True:
            await _woken(wake, None if reader.buffer else loop.timeout(poll_s))
            for task in tasks:
                if task.done():
                    task.result()
            loop.fold(reader.take())
            await loop.turn(leadership.held, service, holder, after_fold)
            if keeper and loop.leading:
                keeper.consider(loop.at)
    except asyncio.CancelledError:
        stopped = True
        raise
    finally:
        await _ended(tasks)
        if keeper:
            await keeper.close(loop.at, last=stopped and loop.leading)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks until they are over: nats-py waits with wait_for(), which in Python 3.11 can swallow one."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _woken(wake: asyncio.Event, timeout: float | None) -> None:
    # Not wait_for(): in Python 3.11 it can swallow a cancellation that comes with what it waits for.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await wake.wait()
    wake.clear()


@dataclass
class _Loop:
    """Where the loop stands: `barrier` is the sequence that must be folded before anything may be decided."""

    bus: Bus
    source: str
    core: Core
    clock: LogClock
    barrier: int
    at: Position = START
    leading: bool = False
    cause: Recorded | None = None
    again: bool = False  # something was unavailable in the last turn, and no news may come to wake the next one

    @property
    def seq(self) -> int:
        return self.at.seq

    def fold(self, bursts: list[Burst]) -> None:
        evolve = self.core.evolve
        for burst in bursts:
            for recorded in burst.recorded:
                evolve(recorded)
            if burst.recorded:
                self.cause = burst.recorded[-1]
            self.at = burst.position
        if bursts:
            self.clock.saw(self.at.at_ms)

    def timeout(self, poll_s: float | None) -> float | None:
        """Seconds to the next due time; never zero, so that a core that is wrong about it cannot spin."""
        if self.again:
            return RETRY_S
        if not self.leading or self.seq < self.barrier:
            return poll_s
        now_ms = self.clock.now_ms()
        due_ms = self.core.due_ms(now_ms)
        if due_ms is None:
            return poll_s
        until = max(0.01, (due_ms - now_ms) / 1000)
        return until if poll_s is None else min(until, poll_s)

    async def turn(
        self, held: bool, service: str, holder: str, after_fold: Callable[[bool], Awaitable[None]] | None
    ) -> None:
        if self.leading and not held:
            self.leading = False
            log.warning("%s lost the lease", self.source)
        self.again = False
        if self.seq < self.barrier:
            return
        if held and not self.leading:
            await self._elect(service, holder)
            if self.seq < self.barrier:
                return
        if after_fold:
            try:
                await after_fold(self.leading)
            except Unavailable as error:
                self._later(error)
                return
        if self.leading:
            self.barrier = max(self.barrier, await self._decide())

    async def _elect(self, service: str, holder: str) -> None:
        try:
            self.barrier = (await self.bus.log.append(self._stamped(LeaderElected(service=service, holder=holder)))).seq
        except Unavailable as error:
            self._later(error)
        else:
            self.leading = True
            log.info("%s leads from %d", self.source, self.barrier)

    def _later(self, error: Unavailable) -> None:
        log.warning("%s: %s", self.source, error)
        self.again = True

    def _stamped(self, event: Event, id: str | None = None) -> Envelope:
        return stamp(event, self.source, id=id)

    async def _decide(self) -> int:
        """Append what the core decides; the sequence that must be read back before it decides again."""
        decisions = self.core.decide(self.clock.now_ms())
        if not decisions:
            return 0
        with span(f"{self.source.split('/')[0]} decide", {"stoker.based_on_seq": self.seq}, self.cause):
            return await self._append(decisions)

    async def _append(self, decisions: list[Decision]) -> int:
        """One after the other; but those in a row without a guard together, since nothing depends on their order."""
        upto = 0
        for expect, several in groupby(decisions, lambda decision: decision.expect):
            envelopes = [self._stamped(decision.event, decision.id) for decision in several]
            try:
                if expect is None:
                    landed = await self.bus.log.append_all(envelopes)
                else:
                    landed = [await self.bus.log.append(envelope, expect) for envelope in envelopes]
            except Conflict as conflict:
                log.info("%s: %s", self.source, conflict)
                return max(upto, conflict.actual)
            except Unavailable as error:
                self._later(error)
                return upto
            upto = max(upto, *(found.seq for found in landed))
        return upto
