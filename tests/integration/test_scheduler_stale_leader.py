"""Two scheduler processes on a real log: the leader freezes past its lease, wakes, and decides nothing that counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from stoker_chassis.clock import stamp
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import AttemptPlaced, CancelRequested, DecisionBatch, Event, JobFinished, LeaderElected
from stoker_scheduler.evolve import evolve
from stoker_scheduler.state import State
from tests.builders import exited, joined, ready, released, sealed, started, submitted
from tests.waiting import until

E = TypeVar("E", bound=Event)
START_DEADLINE_S = 3.0  # over while the leader is frozen: it wakes and believes that the job never started


@contextmanager
def scheduler(url: str, instance: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | {
        "STOKER_NATS_URL": url,
        "STOKER_INSTANCE": instance,
        "STOKER_START_DEADLINE_SECONDS": str(START_DEADLINE_S),
    }
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "stoker_scheduler"], env=env, stderr=out, stdout=out)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


async def told(bus: Bus, kind: type[E]) -> list[E]:
    return [r.event async for r in bus.log.read() if isinstance(r.event, kind)]


async def tell(bus: Bus, *events: Event) -> None:
    for event in events:
        await bus.log.append(stamp(event, "test"))


async def test_a_leader_that_was_frozen_past_its_lease_lands_no_decision(
    tmp_path: Path, nats_server: EmbeddedNats, bus: Bus
) -> None:
    async def leads(instance: str) -> bool:
        return instance in [e.holder for e in await told(bus, LeaderElected)]

    async def placed(job_id: str) -> bool:
        return job_id in [e.job_id for e in await told(bus, AttemptPlaced)]

    async def stops() -> list[str]:
        return [a.reason for b in await told(bus, DecisionBatch) for a in b.actions if a.action == "stop"]

    async def cancelled() -> bool:
        return "cancelled" in await stops()

    async def finished() -> bool:
        return len(await told(bus, JobFinished)) == 1

    first_log, url = tmp_path / "first.log", nats_server.url
    with ExitStack() as processes:
        first = processes.enter_context(scheduler(url, "first", first_log))
        await tell(bus, joined("n1"), ready("n1"))
        await until(lambda: leads("first"), 15)
        processes.enter_context(scheduler(url, "second", tmp_path / "second.log"))
        await tell(bus, submitted("j"))
        await until(lambda: placed("j"))
        due = time.monotonic() + START_DEADLINE_S
        (fence,) = [e.fence for e in await told(bus, AttemptPlaced)]
        first.send_signal(signal.SIGSTOP)
        await until(lambda: leads("second"), 15)
        await tell(bus, started("j", 1, "n1", fence))
        await until(lambda: time.monotonic() > due)
        first.send_signal(signal.SIGCONT)
        await until(lambda: "lost the lease" in first_log.read_text())
        at = ("j", 1, "n1", fence)
        await tell(bus, CancelRequested(job_id="j"))
        await until(cancelled)
        await tell(bus, exited(*at, "cancelled", "cancelled"), released(*at), sealed(*at))
        await until(finished)

    state = State()
    async for recorded in bus.log.read():
        state = evolve(state, recorded)
    assert [e.holder for e in await told(bus, LeaderElected)] == ["first", "second"]
    assert (await stops()).count("lost") == state.voided, (
        "what the first said when it woke is void, if the log took it at all"
    )
    assert [e.state for e in await told(bus, JobFinished)] == ["cancelled"]
    assert state.owner == {"n1": {}}
