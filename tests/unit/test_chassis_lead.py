"""The leader loop: folds first, decides once, gives way, and tries again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from stoker_chassis import service
from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Appended, Expect, Unavailable
from stoker_chassis.memory import MemoryLease, MemoryLog, memory_bus
from stoker_chassis.service import Decision, lead
from stoker_chassis.stores import Bus
from stoker_proto import Envelope, LeaderElected, NodeJoined, NodeReady, Recorded
from tests.builders import joined, ready
from tests.waiting import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RENEW_S", 0.02)
    monkeypatch.setattr(service, "RETRY_S", 0.02)


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


@dataclass
class Greeter:
    """Makes every node that joined ready, once; remembers what it had folded whenever it was asked to decide."""

    guarded: bool = True
    folded: list[Recorded] = field(default_factory=list)
    asked_after: list[int] = field(default_factory=list)

    def evolve(self, recorded: Recorded) -> None:
        self.folded.append(recorded)

    def decide(self, now_ms: int) -> list[Decision]:
        self.asked_after.append(self.folded[-1].seq)
        events = [r.event for r in self.folded]
        done = {event.node for event in events if isinstance(event, NodeReady)}
        waiting = [event.node for event in events if isinstance(event, NodeJoined) and event.node not in done]
        return [Decision(ready(n), Expect(ready(n).subject(), 0) if self.guarded else None) for n in waiting]

    def due_ms(self, now_ms: int) -> int | None:
        return None


@asynccontextmanager
async def leading(
    bus: Bus,
    holder: str,
    core: service.Core,
    after_fold: Callable[[bool], Awaitable[None]] | None = None,
    poll_s: float | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(lead(bus, "greeter", holder, core, after_fold=after_fold, poll_s=poll_s))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def append(bus: Bus, *nodes: str) -> None:
    for node in nodes:
        await bus.log.append(stamp(joined(node), "test"))


async def made_ready(bus: Bus) -> list[str]:
    return [r.event.node async for r in bus.log.read() if isinstance(r.event, NodeReady)]


async def leaders(bus: Bus) -> list[str]:
    return [r.event.holder async for r in bus.log.read() if isinstance(r.event, LeaderElected)]


def readies(bus: Bus, count: int) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return len(await made_ready(bus)) >= count

    return reached


async def test_everything_is_decided_once(bus: Bus) -> None:
    await append(bus, "a", "b")
    core = Greeter(guarded=False)
    async with leading(bus, "x", core):
        await until(readies(bus, 2))
        await append(bus, "c")
        await until(readies(bus, 3))
        end = await bus.log.end()
        await until(lambda: core.asked_after[-1] == end)
    assert await made_ready(bus) == ["a", "b", "c"]


async def test_a_new_leader_folds_everything_up_to_its_own_election_before_it_decides(bus: Bus) -> None:
    await append(bus, *(f"n{i}" for i in range(300)))
    for i in range(300):
        await bus.log.append(stamp(ready(f"n{i}"), "the leader before"))
    core = Greeter()
    async with leading(bus, "x", core):
        await until(lambda: bool(core.asked_after))
    assert await leaders(bus) == ["x"]
    assert core.asked_after[0] == 601
    assert len(await made_ready(bus)) == 300


@dataclass
class Choosy(Greeter):
    """Knows nothing but nodes, and says so."""

    wants: frozenset[str] = frozenset({NodeJoined.type_name, NodeReady.type_name})


async def test_a_core_sees_only_what_it_wants_and_leads_all_the_same(bus: Bus) -> None:
    await append(bus, "a")
    core = Choosy(guarded=False)
    async with leading(bus, "x", core):
        await until(readies(bus, 1))
        await append(bus, "b")
        await until(readies(bus, 2))
    assert await leaders(bus) == ["x"]
    assert await made_ready(bus) == ["a", "b"]
    assert {type(r.event) for r in core.folded} == {NodeJoined, NodeReady}


async def test_only_one_of_two_leads_and_the_other_takes_over(bus: Bus) -> None:
    first, second = Greeter(guarded=False), Greeter(guarded=False)
    async with leading(bus, "x", first) as leader:
        await until(lambda: bool(first.asked_after))
        async with leading(bus, "y", second):
            await append(bus, "a")
            await until(readies(bus, 1))
            await until(lambda: len(second.folded) == 3)
            assert second.asked_after == []
            leader.cancel()
            await append(bus, "b")
            await until(readies(bus, 2))
    assert await leaders(bus) == ["x", "y"]
    assert await made_ready(bus) == ["a", "b"]
    assert not first.asked_after or first.asked_after[-1] < second.asked_after[0]


async def test_who_loses_the_lease_folds_but_decides_no_more(bus: Bus) -> None:
    now = 0.0
    lease = MemoryLease(lambda: now)
    bus = replace(bus, lease=lease)
    core = Greeter()
    leading_now: list[bool] = []

    async def after_fold(leads: bool) -> None:
        leading_now.append(leads)

    async with leading(bus, "x", core, after_fold):
        await until(lambda: bool(core.asked_after))
        now += 100
        await lease.acquire("greeter", "usurper", 50)
        await until(lambda: not leading_now[-1])
        asked = len(core.asked_after)
        await append(bus, "a")
        await until(lambda: len(core.folded) == 2)
        assert len(core.asked_after) == asked
        now += 100
        await until(readies(bus, 1))
    assert await leaders(bus) == ["x", "x"]


class Interloper(MemoryLog):
    """A log in which somebody else is always a little quicker with the first verdict on a node."""

    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        if expect and expect.seq == 0 and envelope.source == "greeter/x" and await self.last(expect.subject) is None:
            await super().append(stamp(ready("a"), "interloper"))
        return await super().append(envelope, expect)


async def test_who_finds_that_somebody_wrote_first_reads_it_and_decides_again(bus: Bus) -> None:
    bus = replace(bus, log=Interloper())
    await append(bus, "a")
    core = Greeter()
    async with leading(bus, "x", core):
        await until(readies(bus, 1))
        end = await bus.log.end()
        await until(lambda: core.asked_after[-1] == end)
    (only,) = [r async for r in bus.log.read() if isinstance(r.event, NodeReady)]
    assert only.envelope.source == "interloper"


class Flaky(MemoryLog):
    """A log that is unavailable for the first tries of each event type."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = {LeaderElected.type_name: 2, NodeReady.type_name: 2}

    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        if self.failures.get(envelope.type, 0):
            self.failures[envelope.type] -= 1
            raise Unavailable("not now")
        return await super().append(envelope, expect)


async def test_what_could_not_be_appended_is_tried_again_without_news(bus: Bus) -> None:
    bus = replace(bus, log=Flaky())
    await append(bus, "a")
    async with leading(bus, "x", Greeter()):
        await until(readies(bus, 1))
    assert await made_ready(bus) == ["a"]


async def test_nothing_is_decided_until_what_was_folded_is_shown(bus: Bus) -> None:
    await append(bus, "a")
    core = Greeter()
    calls: list[int] = []

    async def after_fold(leads: bool) -> None:
        if leads:
            calls.append(len(core.asked_after))
            if len(calls) <= 2:
                raise Unavailable("the board is away")

    async with leading(bus, "x", core, after_fold):
        await until(readies(bus, 1))
    assert calls[:3] == [0, 0, 0]


@dataclass
class Alarm(Greeter):
    """Has something to decide 200 ms after the first event, and no news to remind it."""

    def decide(self, now_ms: int) -> list[Decision]:
        return super().decide(now_ms) if now_ms >= self.folded[0].at_ms + 200 else []

    def due_ms(self, now_ms: int) -> int | None:
        return self.folded[0].at_ms + 200


async def test_time_alone_makes_the_core_decide(bus: Bus) -> None:
    await append(bus, "a")
    async with leading(bus, "x", Alarm()):
        await until(readies(bus, 1))


async def test_a_core_that_looks_beyond_the_log_is_asked_regularly(bus: Bus) -> None:
    core = Greeter()
    async with leading(bus, "x", core, poll_s=0.01):
        await until(lambda: len(core.asked_after) >= 5)
    assert await bus.log.end() == 1


async def test_a_quiet_leader_does_not_spin(bus: Bus) -> None:
    core = Greeter()
    async with leading(bus, "x", core):
        await until(lambda: bool(core.asked_after))
        asked = len(core.asked_after)
        await asyncio.sleep(0.2)
        assert len(core.asked_after) <= asked + 1


async def test_the_lease_is_free_at_once_when_the_leader_stops(bus: Bus) -> None:
    core = Greeter()
    async with leading(bus, "x", core):
        await until(lambda: bool(core.asked_after))
        assert not await bus.lease.acquire("greeter", "y", 1)
    assert await bus.lease.acquire("greeter", "y", 1)


class Broken(Greeter):
    def evolve(self, recorded: Recorded) -> None:
        raise ValueError("cannot fold this")


async def test_an_error_of_the_core_ends_the_loop(bus: Bus) -> None:
    await append(bus, "a")
    with pytest.raises(ValueError, match="cannot fold this"):
        async with asyncio.timeout(5):
            await lead(bus, "greeter", "x", Broken())


class Deaf(MemoryLease):
    """A lease that swallows the first cancellation, as a client may do when its answer comes at the same moment."""

    def __init__(self) -> None:
        super().__init__()
        self.swallowed = False

    async def acquire(self, name: str, holder: str, ttl_s: int) -> bool:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            if self.swallowed:
                raise
            self.swallowed = True
        return await super().acquire(name, holder, ttl_s)


async def test_a_leader_stops_also_when_a_cancellation_is_swallowed(bus: Bus) -> None:
    lease = Deaf()
    bus = replace(bus, lease=lease)
    leader = asyncio.create_task(lead(bus, "greeter", "x", Greeter()))
    await asyncio.sleep(0.05)
    leader.cancel()
    _, late = await asyncio.wait([leader], timeout=5)
    assert lease.swallowed
    assert not late
