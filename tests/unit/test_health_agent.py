"""The agent of a node: each duty is done once, and an agent that was killed goes on where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from stoker_chassis.clock import stamp
from stoker_chassis.device_simulated import SimulatedDevices, inject
from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_chassis.warm import WarmWorker
from stoker_health import agent as agent_module
from stoker_health.agent import Agent
from stoker_health.allreduce import contribution
from stoker_health.prober import Group, Probed, Prober
from stoker_health.settings import HealthSettings
from stoker_proto import (
    AllReduceSum,
    Event,
    FindingRecorded,
    JobFinished,
    NodeJoined,
    NodeReleased,
    NodeScanned,
    PreflightPassed,
    PreflightReported,
    PreflightStarted,
    RetestRequested,
    SelfTested,
)

from .health_node import exit_of, gang

T = TypeVar("T", bound=Event)


class FakeProber(Prober):
    """Answers at once with right sums, unless told otherwise; may be held back."""

    def __init__(self) -> None:
        super().__init__(WarmWorker(Path("/nowhere")), SimulatedDevices("n1", Path("/nowhere"), 0), Path("/nowhere"), 1)
        self.groups: list[Group] = []
        self.errors = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def probe(self, gpus: Sequence[str], group: Group) -> Probed:
        self.groups.append(group)
        await self.may_end.wait()
        if self.errors:
            self.errors -= 1
            return Probed(error="no route")
        slots = tuple(map(contribution, range(group.world)))
        ranks = range(group.first_rank, group.first_rank + len(gpus))
        return Probed(tuple(AllReduceSum(rank=r, slots=slots, seconds=0.1) for r in ranks))


@dataclass
class Bench:
    """One node's agent on a log in memory."""

    bus: Bus
    folder: Path
    prober: FakeProber = field(default_factory=FakeProber)

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        """The agent runs; at the end it is killed wherever it is."""
        settings = HealthSettings(
            node="n1", boot_epoch="b1", data_dir=self.folder, sim_dir=self.folder, poll_seconds=0.01
        )
        devices = SimulatedDevices("n1", self.folder, 2)
        running = asyncio.create_task(Agent(self.bus, devices, self.prober, settings).run(lambda: None))
        try:
            yield
            assert not running.done()
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    async def tell(self, event: Event) -> int:
        return (await self.bus.log.append(stamp(event, "test"))).seq

    async def joined(self) -> None:
        gpus = SimulatedDevices("n1", self.folder, 2).inventory()
        await self.tell(NodeJoined(node="n1", boot_epoch="b1", gpus=gpus, cpus=1, memory_bytes=1, simulated=True))

    async def all(self, kind: type[T]) -> list[T]:
        return [r.event async for r in self.bus.log.read() if isinstance(r.event, kind)]

    async def first(self, kind: type[T], count: int = 1) -> list[T]:
        """The first `count` events of a kind, as soon as they are there."""

        async def there() -> bool:
            return len(await self.all(kind)) >= count

        await until(there)
        return await self.all(kind)

    async def probing(self) -> None:
        async def begun() -> bool:
            return bool(self.prober.groups)

        await until(begun)

    async def beats(self) -> int:
        return len([s async for s in self.bus.telemetry.follow("stoker.device.n1", wait=False)])

    async def look_again(self) -> None:
        """Two more heartbeats: the agent has polled since."""
        before = await self.beats()

        async def beaten() -> bool:
            return await self.beats() >= before + 2

        await until(beaten)


async def until(true: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    monkeypatch.setenv("STOKER_HEARTBEAT_SECONDS", "0.03")
    return Bench(memory_bus(tmp_path / "blobs"), tmp_path)


async def test_a_node_is_tested_once_when_it_has_joined(bench: Bench) -> None:
    async with bench.agent():
        assert await bench.all(SelfTested) == []
        await bench.joined()
        [told] = await bench.first(SelfTested)
        assert (told.cause, told.passed) == ("joined", True)
        assert bench.prober.groups[0].world == 2
    async with bench.agent():
        await bench.look_again()
        assert len(await bench.all(SelfTested)) == 1


async def test_a_test_that_could_not_measure_is_done_again_and_proves_nothing_until_then(bench: Bench) -> None:
    bench.prober.errors = 7
    async with bench.agent():
        await bench.joined()
        [told] = await bench.first(SelfTested)
    assert told.passed
    assert len(bench.prober.groups) == 8


async def test_an_agent_killed_during_the_test_of_its_node_tests_again(bench: Bench) -> None:
    bench.prober.may_end.clear()
    async with bench.agent():
        await bench.joined()
        await bench.probing()
    assert await bench.all(SelfTested) == []
    bench.prober.may_end.set()
    async with bench.agent():
        assert len(await bench.first(SelfTested)) == 1


async def test_a_retest_asked_for_during_a_test_is_done_after_it(bench: Bench) -> None:
    bench.prober.may_end.clear()
    async with bench.agent():
        await bench.joined()
        await bench.probing()
        asked = await bench.tell(RetestRequested(node="n1"))
        bench.prober.may_end.set()
        first, second = await bench.first(SelfTested, 2)
    assert (first.cause, second.cause) == ("joined", "retest")
    assert first.began_seq < asked <= second.began_seq


async def test_a_lost_gpu_is_recorded_once_and_fails_the_test_without_a_probe(bench: Bench) -> None:
    inject(bench.folder, "n1", 0, "xid", 79)
    async with bench.agent():
        await bench.joined()
        [told] = await bench.first(SelfTested)
        await bench.look_again()
        checks = [(f.result.check, f.result.severity, f.result.action) for f in await bench.all(FindingRecorded)]
    assert not told.passed
    assert checks == [("xid", "fatal", "reboot"), ("gpu_present", "fatal", "reboot")]
    assert bench.prober.groups == []


async def test_an_application_xid_is_recorded_and_does_not_fail_the_nodes_test(bench: Bench) -> None:
    inject(bench.folder, "n1", 0, "xid", 31)
    async with bench.agent():
        await bench.joined()
        [told] = await bench.first(SelfTested)
        [found] = await bench.first(FindingRecorded)
    assert told.passed
    assert found.result.severity == "info"


async def test_a_restarted_agent_does_not_record_standing_faults_again(bench: Bench) -> None:
    inject(bench.folder, "n1", 0, "xid", 48)
    async with bench.agent():
        await bench.first(FindingRecorded)
    async with bench.agent():
        await bench.look_again()
    assert len(await bench.all(FindingRecorded)) == 1


async def test_a_fault_that_comes_back_after_release_is_a_new_finding(bench: Bench) -> None:
    inject(bench.folder, "n1", 0, "xid", 48)
    async with bench.agent():
        await bench.first(FindingRecorded)
    inject(bench.folder, "n1", 0, "clear")
    await bench.tell(NodeReleased(node="n1", boot_epoch="b1", rule="re-test", reason="passed"))
    inject(bench.folder, "n1", 0, "xid", 48)
    async with bench.agent():
        first, second = await bench.first(FindingRecorded, 2)
    assert first.finding_id != second.finding_id


async def test_a_gpu_of_the_nodes_inventory_that_is_not_listed_any_more_is_a_fatal_finding(bench: Bench) -> None:
    gpus = SimulatedDevices("n1", bench.folder, 3).inventory()
    await bench.tell(NodeJoined(node="n1", boot_epoch="b1", gpus=gpus, cpus=1, memory_bytes=1, simulated=True))
    async with bench.agent():
        [found] = await bench.first(FindingRecorded)
    assert (found.result.check, found.result.severity, found.result.entity) == ("gpu_count", "fatal", "SIM-n1-2")


async def test_a_failed_attempt_makes_the_agent_look_and_say_that_it_has_looked(bench: Bench) -> None:
    await bench.tell(gang("n1", "n2", preflight="fresh"))
    async with bench.agent():
        await bench.tell(exit_of("n2"))
        await bench.first(NodeScanned)
        await bench.tell(exit_of("n1"))
        await bench.look_again()
        assert [(s.job_id, s.attempt) for s in await bench.all(NodeScanned)] == [("j", 1)]


async def test_what_the_scan_finds_stands_in_the_log_before_it_says_so(bench: Bench) -> None:
    await bench.tell(gang("n1", preflight="fresh"))
    await bench.tell(exit_of("n1"))
    inject(bench.folder, "n1", 0, "xid", 79)
    async with bench.agent():
        await bench.first(NodeScanned)
    kinds = [type(r.event).__name__ async for r in bench.bus.log.read(after=2)]
    assert kinds == ["FindingRecorded", "FindingRecorded", "NodeScanned"]


async def test_attempts_that_end_well_or_are_stopped_or_run_elsewhere_ask_for_no_scan(bench: Bench) -> None:
    await bench.tell(gang("n1", preflight="fresh"))
    await bench.tell(gang("n2", preflight="fresh").model_copy(update={"job_id": "k"}))
    async with bench.agent():
        await bench.tell(exit_of("n1", outcome="ok"))
        await bench.tell(exit_of("n1", outcome="cancelled", asked="cancelled"))
        await bench.tell(exit_of("n2").model_copy(update={"job_id": "k"}))
        await bench.look_again()
    assert await bench.all(NodeScanned) == []


async def test_the_head_offers_a_meeting_place_and_every_node_reports_its_part(bench: Bench) -> None:
    async with bench.agent():
        await bench.tell(gang("n1", "n2"))
        [started] = await bench.first(PreflightStarted)
        [told] = await bench.first(PreflightReported)
        group = bench.prober.groups[0]
    assert (started.round, started.master_addr) == (1, "127.0.0.1")
    assert (group.master_port, group.first_rank, group.world) == (started.master_port, 0, 4)
    assert [s.rank for s in told.sums] == [0, 1]


def head(node: str, round: int = 1) -> PreflightStarted:
    port = 4000 + round
    return PreflightStarted(
        node=node, boot_epoch="b1", job_id="j", attempt=1, round=round, master_addr="127.0.0.1", master_port=port
    )  # fmt: skip


def reported(node: str, round: int = 1, error: str | None = None) -> PreflightReported:
    return PreflightReported(
        node=node, boot_epoch="b1", job_id="j", attempt=1, round=round, results=(), error=error
    )  # fmt: skip


async def test_a_node_that_is_not_the_head_waits_for_the_heads_offer(bench: Bench) -> None:
    async with bench.agent():
        await bench.tell(gang("n2", "n1"))
        await bench.look_again()
        assert bench.prober.groups == []
        await bench.tell(head("n2"))
        await bench.first(PreflightReported)
        group = bench.prober.groups[0]
    assert (group.master_port, group.first_rank) == (4001, 2)


async def test_a_round_that_could_not_measure_on_any_node_is_followed_by_another(bench: Bench) -> None:
    async with bench.agent():
        await bench.tell(gang("n1", "n2"))
        await bench.first(PreflightReported)
        await bench.tell(reported("n2", error="no route"))
        rounds = await bench.first(PreflightReported, 3)
    assert [(r.node, r.round) for r in rounds] == [("n1", 1), ("n2", 1), ("n1", 2)]


async def test_an_agent_killed_in_a_preflight_comes_back_into_the_same_round_and_reports_once(bench: Bench) -> None:
    bench.prober.may_end.clear()
    async with bench.agent():
        await bench.tell(gang("n1", "n2"))
        await bench.probing()
    bench.prober.may_end.set()
    async with bench.agent():
        await bench.first(PreflightReported)
        await bench.look_again()
    assert bench.prober.groups[0] == bench.prober.groups[1]
    async with bench.agent():
        await bench.look_again()
    assert len(await bench.all(PreflightStarted)) == len(await bench.all(PreflightReported)) == 1
    assert len(bench.prober.groups) == 2


async def test_a_preflight_that_is_judged_or_whose_job_is_over_is_left_alone(bench: Bench) -> None:
    await bench.tell(gang("n1", "n2"))
    await bench.tell(PreflightPassed(job_id="j", attempt=1, nodes=("n1", "n2")))
    await bench.tell(gang("n1", "n2").model_copy(update={"job_id": "k"}))
    await bench.tell(JobFinished(job_id="k", state="cancelled", outcome="cancelled", attempts=1, gpu_ms=0))
    async with bench.agent():
        await bench.look_again()
    assert bench.prober.groups == []


async def test_after_the_last_round_the_agent_rests_until_the_leader_has_judged(bench: Bench) -> None:
    bench.prober.errors = 3
    async with bench.agent():
        await bench.tell(gang("n1"))
        await bench.first(PreflightReported, 3)
        await bench.tell(RetestRequested(node="n9"))
        await bench.look_again()
    assert [r.round for r in await bench.all(PreflightReported)] == [1, 2, 3]


async def test_a_gpu_that_another_attempt_keeps_busy_passes_the_preflight(bench: Bench) -> None:
    SimulatedDevices("n1", bench.folder, 2).opened("SIM-n1-0", os.getpid())
    placed = gang("n1", gpus=1)
    part = placed.allocations[0].model_copy(update={"gpus": ("SIM-n1-0",), "milli": 500})
    async with bench.agent():
        await bench.joined()
        await bench.tell(placed.model_copy(update={"allocations": (part,)}))
        (told,) = await bench.first(PreflightReported)
    assert (told.results, told.error, len(told.sums)) == ((), None, 1)


async def test_an_attempt_that_broke_within_its_grace_is_looked_after_and_one_that_gave_way_is_not(
    bench: Bench,
) -> None:
    async with bench.agent():
        await bench.joined()
        for job, outcome in (("gave-way", "preempted"), ("broke", "oom")):
            await bench.tell(gang("n1", preflight="fresh").model_copy(update={"job_id": job}))
            ended = exit_of("n1", outcome=outcome, asked="preempted")
            await bench.tell(ended.model_copy(update={"job_id": job}))
        (scanned,) = await bench.first(NodeScanned)
        await bench.look_again()
    assert scanned.job_id == "broke"
    assert len(await bench.all(NodeScanned)) == 1
