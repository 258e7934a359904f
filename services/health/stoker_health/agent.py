"""The agent of one node: polls its devices, tests them, takes part in preflights, and looks again after a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from stoker_chassis.clock import new_id, stamp
from stoker_chassis.device import Devices, Poll
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import Bus
from stoker_proto import (
    CheckResult,
    DeviceSample,
    Event,
    FindingRecorded,
    NodeScanned,
    PreflightReported,
    PreflightStarted,
    SelfTested,
    subjects,
)

from .allreduce import wrong_ranks
from .catalogue import graded
from .duties import Duties, Key, Preflight, evolve
from .judge import HARD
from .judge_gang import MAX_ROUNDS
from .prober import Group, Probed, Prober, free_port
from .settings import HealthSettings

SELF_TEST_TRIES = 3
RETRY_S = 2.0
# What a self-test must have measured. Other checks that cannot be measured are gaps in what we watch, not faults.
MUST_MEASURE = ("nvml_answers", "gpu_present", "gpu_count", "allreduce_sum", "matmul_checksum")
log = logging.getLogger(__name__)


class Agent:
    """Everything that one node's agent does."""

    def __init__(self, bus: Bus, devices: Devices, prober: Prober, settings: HealthSettings) -> None:
        self._bus = bus
        self._devices = devices
        self._prober = prober
        self._settings = settings
        self._source = f"health/{settings.node}"
        self._duties = Duties(settings.node, settings.boot_epoch)
        self._news = asyncio.Condition()
        self._working: dict[object, asyncio.Task[None]] = {}
        self._bad: set[str] = set()
        self._folded = asyncio.Event()
        self._polling = asyncio.Lock()

    async def run(self, ready: Callable[[], None]) -> None:
        """For ever. Nothing is done before the whole log is folded, so that nothing is done twice."""
        end = await self._bus.log.end()
        if end == 0:
            self._folded.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_for_ever())
            ready()
            async for recorded in self._bus.log.follow():
                async with self._news:
                    self._duties = evolve(self._duties, recorded)
                    self._news.notify_all()
                if recorded.seq >= end:
                    self._folded.set()
                    self._see_to(tasks)

    def _see_to(self, tasks: asyncio.TaskGroup) -> None:
        """Begin every open duty that is not being worked on."""
        duties = self._duties
        if duties.due_test:
            self._begin(tasks, "self-test", self._self_tests())
        for key, preflight in duties.preflights.items():
            self._begin(tasks, ("preflight", key), self._preflight(key, preflight))
        for key in duties.scans:
            self._begin(tasks, ("scan", key), self._scan(key))

    def _begin(self, tasks: asyncio.TaskGroup, name: object, work: Coroutine[Any, Any, None]) -> None:
        if name in self._working and not self._working[name].done():
            work.close()
            return
        self._working[name] = tasks.create_task(work)

    async def _say(self, event: Event, id: str | None = None) -> None:
        id = id or new_id()
        while True:
            try:
                await self._bus.log.append(stamp(event, self._source, id=id))
            except Unavailable as error:
                log.warning("%s", error)
            else:
                return

    # Looking at the devices

    async def _poll_for_ever(self) -> None:
        """A restarted agent takes faults that stand in the log already for known."""
        await self._folded.wait()
        self._bad = set(self._duties.standing)
        beat = 0.0
        while True:
            looked = await self._look()
            if time.monotonic() - beat >= self._settings.heartbeat_seconds:
                beat = time.monotonic()
                await self._heartbeat(looked)
            await asyncio.sleep(self._settings.poll_s)

    async def _look(self) -> Poll:
        """Poll once and record what is newly bad. One look at a time, so that no fault is recorded twice."""
        async with self._polling:
            looked = await asyncio.to_thread(self._devices.poll)
            results = tuple(graded(r) for r in (*looked.results, *self._missing(looked)))
            bad = {self._fault(r): r for r in results if r.status == "bad"}
            for fault, result in bad.items():
                if fault not in self._bad:
                    await self._record(fault, result)
            self._bad = set(bad)
            return Poll(results, looked.samples)

    def _missing(self, looked: Poll) -> list[CheckResult]:
        """GPUs that the node joined with and that the driver no longer lists."""
        told = {r.entity for r in looked.results if r.check == "gpu_present"}
        joined = self._duties.joined
        if joined is None or not joined.gpus:
            return []
        silent = [r for r in looked.results if r.check == "nvml_answers"]
        if any(r.status == "not_applicable" for r in silent):
            return [CheckResult(check="driver", status="bad", detail="the node has GPUs, and no driver library")]
        if silent:
            return []
        lost = [g.uuid for g in joined.gpus if g.uuid not in told]
        return [CheckResult(check="gpu_count", status="bad", entity=g, detail=f"GPU {g} is gone") for g in lost]

    def _fault(self, result: CheckResult) -> str:
        """The same fault has the same name; a worse state of it (text) or another XID is another fault, a count not."""
        value = f":{result.value:g}" if isinstance(result.value, float) and result.check == "xid" else ""
        if isinstance(result.value, str):
            value = f":{result.value}"
        return f"{self._settings.node}:{self._settings.boot_epoch}:{result.check}:{result.entity}{value}"

    async def _record(self, fault: str, result: CheckResult) -> None:
        """A fault that went away and came back is a new episode of it, with a number of its own."""
        episode = self._duties.found.get(fault, 0)
        finding_id = f"{fault}#{episode}"
        s = self._settings
        event = FindingRecorded(node=s.node, boot_epoch=s.boot_epoch, finding_id=finding_id, result=result)
        await self._say(event, finding_id)

    async def _heartbeat(self, looked: Poll) -> None:
        s = self._settings
        sample = DeviceSample(node=s.node, boot_epoch=s.boot_epoch, gpus=looked.samples)
        try:
            await self._bus.telemetry.publish(subjects.device(s.node), sample.model_dump_json().encode(), new_id())
        except Unavailable as error:
            log.warning("%s", error)

    async def _scan(self, key: Key) -> None:
        """Look now, so that every finding stands in the log before the failure is blamed."""
        await self._look()
        s = self._settings
        event = NodeScanned(node=s.node, boot_epoch=s.boot_epoch, job_id=key[0], attempt=key[1])
        await self._say(event, f"scanned:{key[0]}:{key[1]}:{s.node}")
        async with self._news:
            await self._news.wait_for(lambda: key not in self._duties.scans)

    # Proving the node and the gang

    async def _self_tests(self) -> None:
        """Test as long as one is due, each until it has measured: what could not be measured proves nothing."""
        await self._folded.wait()
        while cause := self._duties.due_test:
            began, before = self._duties.seq, self._duties.tests
            results = await self._self_test()
            failed = any(r.status == "bad" and r.severity in HARD for r in results)
            unmeasured = [r for r in results if r.status == "error" and r.check in MUST_MEASURE]
            if unmeasured and not failed:
                told = "; ".join(r.detail or r.check for r in unmeasured)
                log.warning("the self-test could not measure: %s", told)
                await asyncio.sleep(RETRY_S)
                continue
            s = self._settings
            event = SelfTested(
                node=s.node, boot_epoch=s.boot_epoch, cause=cause, began_seq=began, passed=not failed,
                results=tuple(results),
            )  # fmt: skip
            await self._say(event)
            async with self._news:
                await self._news.wait_for(lambda: self._duties.tests > before)  # noqa: B023

    async def _self_test(self) -> list[CheckResult]:
        joined = self._duties.joined
        gpus = [g.uuid for g in joined.gpus] if joined else []
        looked = await self._look()
        results = [r for r in looked.results if r.status in ("bad", "error")]
        if gpus and not any(r.status == "bad" and r.severity in HARD for r in results):
            results += await self._own_allreduce(gpus)
        return results

    async def _own_allreduce(self, gpus: list[str]) -> list[CheckResult]:
        """All-reduce over the node's own GPUs; tried again when it could not be measured."""
        probed = Probed(error="not tried")
        for _ in range(SELF_TEST_TRIES):
            address = self._settings.address
            group = Group(f"self-test/{new_id()}", address, free_port(address), 0, len(gpus))
            probed = await self._prober.probe(gpus, group)
            if probed.error is None:
                break
        if probed.error is not None:
            return [CheckResult(check="allreduce_sum", status="error", detail=probed.error)]
        ranks, wrong = wrong_ranks({s.rank: s.slots for s in probed.sums}, len(gpus))
        if wrong:
            named = ", ".join(map(str, sorted(ranks))) or "unknown"
            bad = CheckResult(check="allreduce_sum", status="bad", detail=f"all-reduce wrong at local rank {named}")
            return [graded(bad), *map(graded, probed.results)]
        return [CheckResult(check="allreduce_sum", status="ok"), *map(graded, probed.results)]

    async def _preflight(self, key: Key, preflight: Preflight) -> None:
        """Rounds until the leader has judged. A killed agent comes back into the round that it left."""
        placed = preflight.placed
        mine = next(a for a in placed.allocations if a.node == self._settings.node)
        before = [len(a.gpus) for a in sorted(placed.allocations, key=lambda a: a.node_rank)]
        first_rank = sum(before[: mine.node_rank])
        for number in range(1, MAX_ROUNDS + 1):
            if self._settings.node not in preflight.reports.get(number, {}):
                head = await self._entered(key, preflight, number, head=mine.node_rank == 0)
                if head is None:
                    return
                name = f"preflight/{key[0]}/{key[1]}/{number}"
                group = Group(name, str(head.master_addr), int(head.master_port or 0), first_rank, sum(before))
                looked, probed = await asyncio.gather(self._look(), self._prober.probe(mine.gpus, group))
                await self._report(key, number, looked, probed)
            if not await self._another_round(key, preflight, number):
                return
        async with self._news:
            await self._news.wait_for(lambda: key not in self._duties.preflights)

    async def _entered(self, key: Key, preflight: Preflight, number: int, *, head: bool) -> PreflightStarted | None:
        """The head's offer for this round, made by us when we are the head; None when the preflight is over."""
        s = self._settings
        offer = {"master_addr": s.address, "master_port": free_port(s.address)} if head else {}
        if head and number not in preflight.head:
            await self._started(key, number, offer)
        async with self._news:
            await self._news.wait_for(lambda: number in preflight.head or key not in self._duties.preflights)
        if key not in self._duties.preflights:
            return None
        if not head:
            await self._started(key, number, {})
        return preflight.head[number]

    async def _started(self, key: Key, number: int, offer: dict[str, Any]) -> None:
        s = self._settings
        event = PreflightStarted.model_validate(
            {"node": s.node, "boot_epoch": s.boot_epoch, "job_id": key[0], "attempt": key[1], "round": number} | offer
        )
        await self._say(event, f"preflight-started:{key[0]}:{key[1]}:{s.node}:{number}")

    async def _report(self, key: Key, number: int, looked: Poll, probed: Probed) -> None:
        s = self._settings
        bad = tuple(r for r in looked.results if r.status in ("bad", "error"))
        event = PreflightReported(
            node=s.node, boot_epoch=s.boot_epoch, job_id=key[0], attempt=key[1], round=number,
            results=(*bad, *map(graded, probed.results)), sums=probed.sums, error=probed.error,
        )  # fmt: skip
        await self._say(event, f"preflight-reported:{key[0]}:{key[1]}:{s.node}:{number}")

    async def _another_round(self, key: Key, preflight: Preflight, number: int) -> bool:
        """Whether the round ended without a measurement, once every node has reported it or the leader has judged."""
        nodes = {a.node for a in preflight.placed.allocations}

        def settled() -> bool:
            return key not in self._duties.preflights or set(preflight.reports.get(number, {})) >= nodes

        async with self._news:
            await self._news.wait_for(settled)
        if key not in self._duties.preflights:
            return False
        return any(r.error for r in preflight.reports[number].values())
