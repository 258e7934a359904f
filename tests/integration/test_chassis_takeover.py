"""Two processes of one deciding service on a real log: one leads, and the other goes on where a killed one stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stoker_chassis.clock import stamp
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import LeaderElected, NodeReady
from tests.builders import joined
from tests.waiting import until

GREETER = """
from stoker_chassis.eventlog import Expect
from stoker_chassis.hosting import host
from stoker_chassis.service import Decision, lead
from stoker_chassis.settings import Settings
from stoker_proto import NodeJoined, NodeReady

class Greeter:
    def __init__(self):
        self.waiting = {}
    def evolve(self, recorded):
        event = recorded.event
        if isinstance(event, NodeJoined):
            self.waiting[event.node] = NodeReady(node=event.node, boot_epoch="b", rule="r", reason="greeted")
        elif isinstance(event, NodeReady):
            self.waiting.pop(event.node, None)
    def decide(self, now_ms):
        return [Decision(event, Expect(event.subject(), 0)) for event in self.waiting.values()]
    def due_ms(self, now_ms):
        return None

settings = Settings()

async def main(bus, ready):
    ready()
    await lead(bus, "greeter", settings.instance, Greeter())

host("greeter", settings, main)
"""


async def test_a_killed_leader_is_replaced_and_nothing_is_decided_twice(
    tmp_path: Path, nats_server: EmbeddedNats, bus: Bus
) -> None:
    (tmp_path / "greeter.py").write_text(GREETER)

    def start(instance: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"STOKER_NATS_URL": nats_server.url, "STOKER_INSTANCE": instance}
        return subprocess.Popen([sys.executable, str(tmp_path / "greeter.py")], env=env, stderr=subprocess.DEVNULL)

    async def elected() -> list[str]:
        return [r.event.holder async for r in bus.log.read() if isinstance(r.event, LeaderElected)]

    async def greeted() -> list[str]:
        return [r.event.node async for r in bus.log.read() if isinstance(r.event, NodeReady)]

    async def join(*nodes: str) -> None:
        for node in nodes:
            await bus.log.append(stamp(joined(node), "test"))

    async def greets(count: int) -> None:
        async def enough() -> bool:
            return len(await greeted()) >= count

        await until(enough, 15)

    first, second = start("one"), None
    try:
        await join("a", "b")
        await greets(2)
        second = start("two")
        await join("c")
        await greets(3)
        first.kill()
        await join("d", "e")
        await greets(5)
        nats_server.kill9()
        await until(lambda: nats_server.restarts == 1)
        await join("f")
        await greets(6)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
    assert sorted(await greeted()) == ["a", "b", "c", "d", "e", "f"]
    holders = await elected()
    assert holders[0] == "one"
    assert set(holders[1:]) == {"two"}
