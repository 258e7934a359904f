"""Two health leaders at once, for as long as a lost lease goes unnoticed, still say everything once."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Conflict
from stoker_chassis.memory import memory_bus
from stoker_chassis.service import Decision
from stoker_chassis.stores import Bus
from stoker_health.leader import Ear, HealthLeader
from stoker_proto import Event, JobFailureAttributed, NodeQuarantined, NodeReady, PreflightPassed, RankExit
from tests.builders import joined

from .health_node import exit_of, found, gang, report, scanned, self_test

SOON_MS = 1_000


async def tell(bus: Bus, *events: Event) -> None:
    for event in events:
        await bus.log.append(stamp(event, "test"))


async def leader(bus: Bus) -> HealthLeader:
    """One that has read the log to its present end."""
    fresh = HealthLeader(Ear(10.0))
    async for recorded in bus.log.read():
        fresh.evolve(recorded)
    return fresh


async def say(bus: Bus, decisions: list[Decision], who: str) -> None:
    for decision in decisions:
        await bus.log.append(stamp(decision.event, who, id=decision.id), decision.expect)


async def kinds(bus: Bus) -> list[str]:
    return [type(r.event).__name__ async for r in bus.log.read()]


async def test_a_verdict_of_a_leader_that_has_not_read_the_last_one_is_refused(tmp_path: Path) -> None:
    bus = memory_bus(tmp_path)
    await tell(bus, joined("n1"), self_test("n1"))
    stale = await leader(bus)
    await say(bus, (await leader(bus)).decide(SOON_MS), "new")
    await tell(bus, found("n1"))
    await say(bus, (await leader(bus)).decide(SOON_MS), "new")
    with pytest.raises(Conflict):
        await say(bus, stale.decide(SOON_MS), "stale")
    assert [k for k in await kinds(bus) if k in (NodeReady.__name__, NodeQuarantined.__name__)] == [
        "NodeReady",
        "NodeQuarantined",
    ]


async def test_a_judgement_and_a_blame_land_once(tmp_path: Path) -> None:
    bus = memory_bus(tmp_path)
    await tell(bus, joined("n1"), self_test("n1"))
    await say(bus, (await leader(bus)).decide(SOON_MS), "new")
    await tell(bus, gang("n1"), report("n1", range(2), 2))
    await tell(bus, exit_of("n1", RankExit(rank=0, code=1, error_type="ValueError", error="ValueError: x")))
    await tell(bus, scanned("n1"))
    one, two = await leader(bus), await leader(bus)
    await say(bus, one.decide(SOON_MS), "one")
    await say(bus, two.decide(SOON_MS), "two")
    told = await kinds(bus)
    assert told.count(PreflightPassed.__name__) == told.count(JobFailureAttributed.__name__) == 1
