"""On a real log: the scheduler from a snapshot is the scheduler from the whole log, and a stopped leader leaves one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Position
from stoker_chassis.service import lead
from stoker_chassis.stores import Bus, Snapshot, Snapshots
from stoker_local.nats import EmbeddedNats
from stoker_proto import NodeReady, Recorded
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.state import state_hash
from tests.builders import joined
from tests.replay.cluster_story import Story
from tests.waiting import until

EVERY = 29


class Counting(Scheduler):
    """Counts what it was given to fold."""

    folded = 0

    def evolve(self, recorded: Recorded) -> None:
        self.folded += 1
        super().evolve(recorded)


async def started(bus: Bus, snapshots: Snapshots | None = None) -> Counting:
    """A scheduler that has started as a standby and come to the end of the log."""
    scheduler = Counting(Timing())
    known = asyncio.Event()

    async def after_fold(leading: bool) -> None:
        known.set()

    standby = asyncio.create_task(
        lead(bus, "scheduler", "standby", scheduler, after_fold=after_fold, snapshots=snapshots)
    )
    async with asyncio.timeout(20):
        await known.wait()
    standby.cancel()
    await asyncio.gather(standby, return_exceptions=True)
    return scheduler


async def test_a_scheduler_from_a_snapshot_and_the_tail_is_the_one_from_the_whole_log(bus: Bus) -> None:
    story = Story()
    for _ in story.ticks():
        pass
    for recorded in story.records:
        assert (await bus.log.append(recorded.envelope)).seq == recorded.seq
    assert await bus.lease.acquire("scheduler", "somebody else", 600)
    whole = await started(bus)
    assert whole.state.over
    stored = [r async for r in bus.log.read()]
    scheduler = Scheduler(Timing())
    for recorded in stored:
        if recorded.envelope.type in Scheduler.wants:
            scheduler.evolve(recorded)
        if recorded.seq % EVERY == 0 or recorded is stored[-1]:
            at = Position(recorded.seq, recorded.envelope.id, recorded.at_ms)
            await bus.snapshots.save("scheduler", Snapshot(at, scheduler.schema, scheduler.dump()))
            resumed = await started(bus, bus.snapshots)
            assert resumed.folded == sum(r.envelope.type in Scheduler.wants for r in stored[recorded.seq :])
            assert state_hash(resumed.state) == state_hash(whole.state), f"from a snapshot at {recorded.seq}"


GREETER = """
import json, sys
from stoker_chassis import resume
from stoker_chassis.hosting import host
from stoker_chassis.service import Decision, lead
from stoker_chassis.settings import Settings
from stoker_proto import NodeJoined, NodeReady

class Greeter:
    schema = "greeter-1"
    wants = frozenset({NodeJoined.type_name, NodeReady.type_name})
    def __init__(self):
        self.waiting = {}
        self.folded = 0
    def evolve(self, recorded):
        self.folded += 1
        event = recorded.event
        if isinstance(event, NodeJoined):
            self.waiting[event.node] = None
        else:
            self.waiting.pop(event.node, None)
    def decide(self, now_ms):
        reason = f"{self.folded} folded"
        events = [NodeReady(node=node, boot_epoch="b", rule="r", reason=reason) for node in self.waiting]
        return [Decision(event, None, f"ready-{event.node}") for event in events]
    def due_ms(self, now_ms):
        return None
    def dump(self):
        return json.dumps(self.waiting).encode()
    def load(self, data):
        self.waiting = json.loads(data)

resume.WORTH_IT = 10
settings = Settings()

async def main(bus, ready):
    ready()
    await lead(bus, "greeter", settings.instance, Greeter(), snapshots=bus.snapshots)

host("greeter", settings, main)
"""


async def test_a_leader_that_is_told_to_stop_leaves_a_snapshot_for_the_next_one(
    tmp_path: Path, nats_server: EmbeddedNats, bus: Bus
) -> None:
    (tmp_path / "greeter.py").write_text(GREETER)

    def start(instance: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"STOKER_NATS_URL": nats_server.url, "STOKER_INSTANCE": instance}
        return subprocess.Popen([sys.executable, str(tmp_path / "greeter.py")], env=env, stderr=subprocess.DEVNULL)

    async def greeted() -> list[str]:
        return [r.event.reason async for r in bus.log.read() if isinstance(r.event, NodeReady)]

    async def greets(count: int) -> None:
        async def enough() -> bool:
            return len(await greeted()) >= count

        await until(enough, 20)

    first, second = start("one"), None
    try:
        for i in range(20):
            await bus.log.append(stamp(joined(f"n{i}"), "test"))
        await greets(20)
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 20) == 0
        left = await bus.snapshots.latest("greeter")
        assert left is not None
        assert (left.schema, left.position.seq) == ("greeter-1", await bus.log.end())
        await bus.log.append(stamp(joined("later"), "test"))
        second = start("two")
        await greets(21)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
    assert (await greeted())[-1] == "1 folded"
