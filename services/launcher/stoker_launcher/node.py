"""The node: joins, keeps the warm worker alive, and reconciles what runs with what should."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from stoker_chassis.device import Devices
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import Bus
from stoker_chassis.warm import WarmWorker, WarmWorkerGone, WarmWorkerSilent
from stoker_proto import NodeAssignments, NodeJoined

from .attempt import Attempt, Tools
from .facts import Facts
from .ledger import Entry, Ledger
from .pruning import prune
from .reports import Reports
from .settings import LauncherSettings
from .workspace import CodeTrees

WORKER_CHECK_S = 0.5
CONTACT_S = 5.0
PRUNE_S = 600.0
log = logging.getLogger(__name__)


class Node:
    """Everything that one launcher does."""

    def __init__(self, bus: Bus, devices: Devices, settings: LauncherSettings) -> None:
        self._bus = bus
        self._settings = settings
        self._devices = devices
        self._reports = Reports(bus, settings.node)
        self._worker = WarmWorker(settings.warm_socket)
        self._running: dict[str, Attempt] = {}
        self._tools = Tools(
            settings=settings,
            blobs=bus.blobs,
            reports=self._reports,
            facts=Facts(bus.log),
            ledger=Ledger(settings.node_dir / "ledger"),
            devices=devices,
            worker=self._worker,
            trees=CodeTrees(bus.blobs, settings.node_dir / "code"),
            ports=lambda: {a.entry.master_port for a in self._running.values() if a.entry.master_port is not None},
        )
        self._seen_seq = 0
        self._named: set[str] | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """For ever. Attempts from the ledger are adopted before the node says that it is there."""
        start = await self._bus.log.end()
        await self._start_worker()
        await self._join()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tools.facts.follow(start))
            tasks.create_task(self._keep_worker())
            tasks.create_task(self._keep_contact())
            tasks.create_task(self._keep_room())
            for entry in self._tools.ledger.read():
                self._adopt(entry, tasks)
            ready()
            async for value in self._bus.assignments.watch(self._settings.node):
                self._reconcile(NodeAssignments.model_validate_json(value), tasks)

    async def _join(self) -> None:
        s = self._settings
        event = NodeJoined(
            node=s.node,
            boot_epoch=s.boot_epoch,
            gpus=self._devices.inventory(),
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=psutil.virtual_memory().total,
            simulated=self._devices.simulated,
            labels=s.labels,
        )
        labels = [f"{name}={value}" for name, value in sorted(s.labels.items())]
        await self._reports.say(event, s.node, s.boot_epoch, *labels)

    def _adopt(self, entry: Entry, tasks: asyncio.TaskGroup) -> None:
        """Go on with an attempt of an earlier life of this launcher, unless the node has rebooted since."""
        if entry.assignment.here(self._settings.node).boot_epoch != self._settings.boot_epoch:
            self._tools.ledger.forget(entry)
            return
        log.info("adopting %s, which is %s", entry.name, entry.phase)
        self._begin(Attempt(entry, self._tools), tasks)

    def _begin(self, attempt: Attempt, tasks: asyncio.TaskGroup) -> None:
        name = attempt.entry.name
        self._running[name] = attempt
        tasks.create_task(attempt.run()).add_done_callback(lambda _: self._running.pop(name, None))

    def _reconcile(self, wanted: NodeAssignments, tasks: asyncio.TaskGroup) -> None:
        """Start what is new, stop what is to stop, and end what the log no longer knows. Old news is no news."""
        if wanted.seq < self._seen_seq:
            return
        self._seen_seq = wanted.seq
        named = self._named = set()
        for assignment in wanted.attempts:
            entry = Entry(assignment=assignment)
            named.add(entry.name)
            if assignment.here(self._settings.node).boot_epoch != self._settings.boot_epoch:
                continue
            if entry.name not in self._running:
                if self._tools.ledger.finished(entry):
                    continue
                self._tools.ledger.write(entry)
                self._begin(Attempt(entry, self._tools), tasks)
            if assignment.want == "stop":
                self._running[entry.name].stop(assignment.stop_reason or "lost", assignment.grace_ms)
        for name, attempt in self._running.items():
            if name not in named and attempt.assignment.fence <= wanted.seq:
                attempt.stop("lost", 0)

    async def _keep_worker(self) -> None:
        while True:
            await asyncio.sleep(WORKER_CHECK_S)
            try:
                await self._worker.identity()
            except WarmWorkerSilent as error:
                log.warning("%s; ending it", error)
                self._worker.end()
            except WarmWorkerGone:
                log.warning("the warm worker is gone; starting another")
                await self._start_worker()

    async def _start_worker(self) -> None:
        """Start a warm worker unless one answers. It has a session of its own, so it outlives this launcher."""
        try:
            await self._worker.identity()
        except WarmWorkerGone:
            pass
        else:
            return
        s = self._settings
        s.node_dir.mkdir(parents=True, exist_ok=True)
        lifeline = os.environ.get("STOKER_LIFELINE_FD")
        argv = [sys.executable, "-m", "stoker_chassis.forkserver", "--socket", str(s.warm_socket)]
        process = self._popen([*argv, "--preload", s.preload], lifeline)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                await self._worker.ready(0.5)
            except WarmWorkerGone:
                # It ends with 0 when another one, which is not ready yet, already has the place.
                if process.poll() not in (None, 0):
                    ended = f"the warm worker ended with {process.returncode}: see {s.node_dir}/warm.log"
                    raise RuntimeError(ended) from None
            else:
                return
        process.send_signal(signal.SIGKILL)
        raise RuntimeError("the warm worker did not come up within two minutes")

    def _popen(self, argv: list[str], lifeline: str | None) -> subprocess.Popen[bytes]:
        with (self._settings.node_dir / "warm.log").open("ab") as out:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=(int(lifeline),) if lifeline else (),
            )

    async def _keep_room(self) -> None:
        """Prune now and then, once the desired state has told which attempts still matter."""
        s = self._settings
        while True:
            if self._named is not None:
                await prune(s.node_dir, self._tools.ledger, self._named, time.time() - s.keep_attempts_hours * 3600)
            await asyncio.sleep(min(PRUNE_S, max(1.0, s.keep_attempts_hours * 360)))

    async def _keep_contact(self) -> None:
        """Stop every attempt once the log was out of reach for so long that the scheduler may start them elsewhere."""
        last = time.monotonic()
        while True:
            try:
                await self._bus.log.end()
                last = time.monotonic()
            except Unavailable:
                if time.monotonic() - last > self._settings.self_fence_seconds:
                    for attempt in self._running.values():
                        attempt.stop("lost", 0)
            await asyncio.sleep(CONTACT_S)
