"""Two schedulers at once, one of them paused past its lease: what the stale one decides does not land, or is void."""

from __future__ import annotations

from typing import TypeVar

import pytest

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Conflict
from stoker_chassis.memory import MemoryLog
from stoker_chassis.service import Decision
from stoker_proto import AttemptPlaced, CancelRequested, DecisionBatch, Event, JobFinished, LeaderElected, Place, Stop
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from tests.builders import exited, joined, ready, released, sealed, started, submitted

E = TypeVar("E", bound=Event)
TIMING = Timing(start_deadline_ms=60_000)


class Clock:
    """The log's clock, which goes on when the test says so."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> MemoryLog:
    return MemoryLog(clock)


class Leader:
    """A scheduler that reads and writes when the test lets it; in between it is paused."""

    def __init__(self, log: MemoryLog, name: str, clock: Clock) -> None:
        self._log = log
        self._name = name
        self._clock = clock
        self.core = Scheduler(TIMING)

    async def elected(self) -> Leader:
        await self._log.append(stamp(LeaderElected(service="scheduler", holder=self._name), self._name))
        await self.read()
        return self

    async def read(self) -> None:
        async for recorded in self._log.read(self.core.state.seq):
            self.core.evolve(recorded)

    def decide(self) -> list[Decision]:
        return self.core.decide(self._clock.now_ms)

    async def say(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            await self._log.append(stamp(decision.event, self._name, id=decision.id), decision.expect)

    async def settle(self) -> None:
        """Decide until there is nothing more to say."""
        await self.read()
        while decisions := self.decide():
            await self.say(decisions)
            await self.read()


async def tell(log: MemoryLog, *events: Event) -> None:
    for event in events:
        await log.append(stamp(event, "test"))


async def of_kind(log: MemoryLog, kind: type[E]) -> list[E]:
    return [recorded.event async for recorded in log.read() if isinstance(recorded.event, kind)]


async def test_a_stale_leader_is_refused_once_the_new_one_has_decided_anything(log: MemoryLog, clock: Clock) -> None:
    old = await Leader(log, "old", clock).elected()
    await tell(log, joined("n1"), ready("n1"), submitted("j"))
    await old.read()
    late = old.decide()
    assert any(isinstance(d.event, DecisionBatch) for d in late), "it was paused with a placement in its hand"
    new = await Leader(log, "new", clock).elected()
    await new.settle()
    with pytest.raises(Conflict):
        await old.say(late)
    places = [a for b in await of_kind(log, DecisionBatch) for a in b.actions if isinstance(a, Place)]
    assert [place.job_id for place in places] == ["j"]
    await old.read()
    assert old.decide() == [], "it folds on and agrees"
    assert len(await of_kind(log, AttemptPlaced)) == 1


async def test_a_stale_batch_is_void_when_the_new_leader_had_nothing_to_decide(log: MemoryLog, clock: Clock) -> None:
    old = await Leader(log, "old", clock).elected()
    await tell(log, joined("n1"), ready("n1"), submitted("j"))
    await old.settle()
    attempt = old.core.state.jobs["j"].attempt
    assert attempt is not None
    new = await Leader(log, "new", clock).elected()
    clock.now_ms += TIMING.start_deadline_ms + 1
    await tell(log, started("j", 1, "n1", attempt.fence))
    late = old.decide()
    batches = [d.event for d in late if isinstance(d.event, DecisionBatch)]
    assert [a.reason for b in batches for a in b.actions if isinstance(a, Stop)] == ["lost"]
    await old.say(late)
    await new.settle()
    await old.read()
    for leader in (old, new):
        now = leader.core.state.jobs["j"].attempt
        assert now is not None
        assert (now.fence, now.stop, now.running_ms) == (attempt.fence, None, clock.now_ms)
        assert leader.core.state.voided == 1


async def test_what_landed_untold_is_told_once_though_both_leaders_tell_it(log: MemoryLog, clock: Clock) -> None:
    old = await Leader(log, "old", clock).elected()
    await tell(log, joined("n1"), ready("n1"), submitted("j"))
    await old.read()
    await old.say([d for d in old.decide() if isinstance(d.event, DecisionBatch)])
    await old.read()
    untold = old.decide()
    assert [type(d.event) for d in untold if d.id] == [AttemptPlaced]
    new = await Leader(log, "new", clock).elected()
    await new.settle()
    attempt = new.core.state.jobs["j"].attempt
    assert attempt is not None
    at = ("j", 1, "n1", attempt.fence)
    await tell(log, CancelRequested(job_id="j"), exited(*at), released(*at), sealed(*at))
    await new.settle()
    await old.say(untold)
    await new.settle()
    assert (len(await of_kind(log, AttemptPlaced)), len(await of_kind(log, JobFinished))) == (1, 1)
    assert new.core.state.owner == {"n1": {}}
