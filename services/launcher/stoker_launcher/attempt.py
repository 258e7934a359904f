"""One attempt on this node, from accepted to done: each step is in the ledger before it acts, so any may repeat."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from stoker_chassis.device import Devices
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import BlobStore
from stoker_chassis.telemetry import span
from stoker_chassis.warm import WarmWorker, WarmWorkerGone
from stoker_proto import (
    AttemptExited,
    AttemptPrepared,
    AttemptReleased,
    AttemptStarted,
    Event,
    LogsSealed,
    RankExit,
    StopReason,
)

from .checkpoint import newest
from .facts import Facts
from .ledger import Entry, Ledger
from .outcome import classify, within_grace
from .output import Output
from .plan import Places, Process, Rendezvous, key_of, plan
from .ports import free_port
from .proof import proof
from .ranks import POLL_S, Ranks
from .reports import Reports
from .settings import LauncherSettings
from .workspace import BadTree, CodeTrees

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "USER")
KILL_AGAIN_S = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tools:
    """What an attempt works with."""

    settings: LauncherSettings
    blobs: BlobStore
    reports: Reports
    facts: Facts
    ledger: Ledger
    devices: Devices
    worker: WarmWorker
    trees: CodeTrees
    ports: Callable[[], Collection[int]]


class Attempt:
    """Drives one ledger entry to its end; `stop` may be called at any time."""

    def __init__(self, entry: Entry, tools: Tools) -> None:
        self.entry = entry
        self.tools = tools
        self.assignment = entry.assignment
        self.node = tools.settings.node
        self.folder = tools.settings.node_dir / "attempts" / entry.name
        self.checkpoints = (tools.settings.data_dir / "checkpoints" / self.assignment.job_id).resolve()
        self._stop = asyncio.Event()
        self._told: asyncio.Task[None] | None = None
        if entry.stopping:
            self._stop.set()

    def stop(self, reason: StopReason, grace_ms: int) -> None:
        """Ask it to end. The first reason counts."""
        if not self._stop.is_set() and self.entry.exit is None:
            self._note(stopping=reason, grace_ms=grace_ms)
            self._stop.set()

    def _note(self, **changes: object) -> None:
        self.entry = self.entry.model_copy(update=changes)
        self.tools.ledger.write(self.entry)

    async def run(self) -> None:
        """To the end, from wherever the ledger says it stands."""
        try:
            await self._run()
        finally:
            if self._told:
                self._told.cancel()

    async def _run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.entry.phase in ("accepted", "prepared"):
            meet = await self._prepared() if self.entry.exit is None else None
            if meet is None or not await self._start(meet):
                await self._end_unstarted()
                return
        if self.entry.phase == "starting":
            await self._watch()
        await self._finish()

    def _tell(self, event: Event) -> None:
        """Say it meanwhile, after what was told before: nothing that runs waits for the log."""
        self._told = asyncio.create_task(self._say_after(self._told, event))

    async def _say_after(self, before: asyncio.Task[None] | None, event: Event) -> None:
        if before:
            await before
        await self.tools.reports.say(event, *self._key())

    # Before the ranks run

    async def _prepared(self) -> Rendezvous | None:
        """Everything in place on every node of the gang; None when it was stopped or rejected before."""
        a = self.assignment
        try:
            await self._fetch()
        except (KeyError, BadTree, OSError) as error:
            detail = f"the code tree {a.code} cannot be used: {error}"
            self._note(exit=self._exited(outcome="launch_rejected", detail=detail))
            return None
        if self._stop.is_set():
            return None
        if self.entry.phase == "accepted":
            if a.head.node == self.node:
                found = newest(self.checkpoints) if self._resumes() else None
                self._note(
                    phase="prepared",
                    master_port=free_port(self.tools.settings.address, self.entry.name, self.tools.ports()),
                    resume_path=str(found.path) if found else None,
                    resume_step=found.step if found else None,
                )
            else:
                self._note(phase="prepared")
        head = a.head.node == self.node
        event = AttemptPrepared(
            job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence,
            master_addr=self.tools.settings.address if head else None, master_port=self.entry.master_port,
            resume_path=self.entry.resume_path, resume_step=self.entry.resume_step,
        )  # fmt: skip
        if len(a.allocations) == 1 and a.preflight == "fresh":
            self._tell(event)  # nobody else to wait for: start at once
            assert self.entry.master_port is not None
            return Rendezvous(
                self.tools.settings.address, self.entry.master_port, self.entry.resume_path, self.entry.resume_step
            )
        await self.tools.reports.say(event, *self._key())
        return await self.tools.facts.meeting(a, self._stop)

    async def _fetch(self) -> None:
        while self.assignment.code is not None and not self._stop.is_set():
            try:
                await self.tools.trees.get(self.assignment.code)
            except Unavailable as error:
                log.warning("%s: %s", self.entry.name, error)
                await asyncio.sleep(0.5)
            else:
                return

    def _resumes(self) -> bool:
        asked = self.assignment.spec.outputs.checkpoints
        return asked is not None and asked.resume == "auto"

    async def _end_unstarted(self) -> None:
        if self.entry.exit is None:
            reason = self.entry.stopping or "lost"
            self._note(exit=self._exited(outcome=classify((), reason), asked=reason))
        assert self.entry.exit is not None
        self._tell(self.entry.exit)
        await self._say_released("no process was started")
        self._done()

    # While they run

    def _places(self) -> Places:
        code = self.tools.trees.path(self.assignment.code) if self.assignment.code else self.folder
        return Places(str(self.folder), str(code), str(self.checkpoints), str(self.folder / "parameters.json"))

    def _processes(self, meet: Rendezvous) -> tuple[Process, ...]:
        inherited = {k: os.environ[k] for k in INHERITED if k in os.environ}
        return plan(self.assignment, self.node, meet, self._places(), inherited)

    def _numbers(self) -> tuple[int, ...]:
        return tuple(p.rank for p in self._processes(Rendezvous("", 0)))

    def _ranks(self) -> Ranks:
        keys = {rank: key_of(self.assignment, rank) for rank in self._numbers()}
        return Ranks(self.folder, keys, self.tools.worker, self.entry.worker or "", self.tools.devices)

    async def _start(self, meet: Rendezvous) -> bool:
        """Note who is asked to fork. From the note on, a restart must ask that worker what runs. False when stopped."""
        while not self._stop.is_set():
            try:
                await self.tools.worker.ready(1)
                worker = await self.tools.worker.identity()
            except WarmWorkerGone as error:
                log.warning("%s: %s", self.entry.name, error)
                continue
            if not self._stop.is_set():
                self._note(phase="starting", worker=worker, meet=meet)
                return True
        return False

    async def _watch(self) -> None:
        """Until every rank is gone: by itself, because a neighbour failed, or because it was told to stop."""
        numbers, ranks = self._numbers(), self._ranks()
        output = self._output(numbers)
        await self._fork(ranks)
        enough = asyncio.Event()
        pumping = asyncio.create_task(output.pump(enough))
        try:
            ended, alone = await self._until_gone(ranks, len(numbers))
        except BaseException:
            pumping.cancel()
            raise
        enough.set()
        await pumping
        await output.tell_checkpoints()  # what was saved within the grace is known before the end is
        exits = ranks.exits(ended)
        asked = self.entry.stopping if len(alone) < len(numbers) else None
        if asked and any(e.code != 0 for e in exits if e.rank in alone):
            asked = None  # it failed before it could obey
        if len(ended) < len(numbers):
            outcome = classify((), asked) if asked else "infra_node"
            detail = "the node's warm worker died and took the ranks with it"
        elif asked:
            outcome, detail = within_grace(exits, asked, ranks.unaware() | set(alone)), ""
        else:
            own = tuple(e for e in exits if e.rank in alone)
            outcome, detail = classify(own or exits, None), ""
        exit = self._exited(outcome, ranks=exits, asked=asked, before_stop=alone, detail=detail)
        self._note(phase="exited", exit=exit)

    async def _fork(self, ranks: Ranks) -> None:
        """Fork every rank and say so; nothing to do when the worker that was asked is dead."""
        meet = self.entry.meet
        assert meet is not None
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        (self.folder / "parameters.json").write_text(json.dumps(self.assignment.spec.parameters))
        a = self.assignment
        with span("start ranks", {"job.id": a.job_id, "stoker.attempt": a.attempt, "stoker.node": self.node}):
            started = await ranks.fork(self._processes(meet), Path(self._places().code_dir))
        if started:
            event = AttemptStarted(
                job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence, ranks=self._numbers(),
                resume_step=meet.resume_step,
            )  # fmt: skip
            self._tell(event)

    async def _until_gone(self, ranks: Ranks, count: int) -> tuple[list[int], tuple[int, ...]]:
        """Ranks in the order in which they ended, and those among them that nobody had told to."""
        killed_at: float | None = None
        termed_at: float | None = None
        failed_at: float | None = None
        checked = 0.0
        while True:
            ended = ranks.ended()
            now = time.monotonic()
            alone = tuple(ended) if self.entry.alone is None else self.entry.alone
            gone = len(ended) == count
            if not gone and now - checked > 1.0:
                checked = now
                gone = not await ranks.live()
            if gone:
                await ranks.sweep()
                return ranks.ended(), alone
            if failed_at is None and self.entry.alone is None and any(map(ranks.failed, ended)):
                failed_at = now
            settled = failed_at is not None and now - failed_at >= self.tools.settings.settle_seconds
            if termed_at is None and (self._stop.is_set() or settled or self.entry.alone is not None):
                termed_at = now
                self._note(alone=alone)  # a restart must not take for a failure what obeyed
                # A shell waits for what it started, so both must hear of it. A rank decides itself what becomes of
                # its helpers: it may need them to save.
                await ranks.signal(signal.SIGTERM, group=self.assignment.spec.command is not None)
            over = termed_at is not None and now - termed_at >= self._grace_s(failed_at is None)
            if over and (killed_at is None or now - killed_at > KILL_AGAIN_S):
                killed_at = now
                await ranks.signal(signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    def _grace_s(self, whole: bool) -> float:
        """How long ranks may take to end. Those of a gang that is no longer whole have nothing left to save."""
        if not whole or not self._stop.is_set():
            return 0.0
        grace_ms = self.assignment.grace_ms if self.entry.grace_ms is None else self.entry.grace_ms
        return grace_ms / 1000

    # After they have gone

    def _output(self, ranks: tuple[int, ...]) -> Output:
        return Output(self.assignment, self.node, self.folder, self.checkpoints, ranks, self.tools.reports)

    async def _finish(self) -> None:
        assert self.entry.exit is not None
        if self.entry.phase == "exited":
            self._tell(self.entry.exit)
            await self._say_released(await proof(self.tools.devices, self._ranks(), self.assignment, self.node))
            self._note(phase="released")
        output = self._output(self._numbers())
        await output.finish()
        a = self.assignment
        streams = await output.seal(self.tools.blobs)
        event = LogsSealed(job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence, streams=streams)
        await self.tools.reports.say(event, *self._key())
        self._done()
        await self._ranks().forget()

    async def _say_released(self, why: str) -> None:
        a = self.assignment
        self._tell(AttemptReleased(job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence, proof=why))
        assert self._told
        await self._told

    def _done(self) -> None:
        self._note(phase="done")
        self.tools.facts.forget(self.assignment)

    def _key(self) -> tuple[object, ...]:
        return (self.assignment.job_id, self.assignment.attempt, self.node, self.assignment.fence)

    def _exited(
        self,
        outcome: str,
        *,
        ranks: tuple[RankExit, ...] = (),
        asked: StopReason | None = None,
        before_stop: tuple[int, ...] = (),
        detail: str = "",
    ) -> AttemptExited:
        a = self.assignment
        return AttemptExited.model_validate(
            {
                "job_id": a.job_id, "attempt": a.attempt, "node": self.node, "fence": a.fence, "outcome": outcome,
                "asked": asked, "ranks": ranks, "before_stop": before_stop, "detail": detail,
            }
        )  # fmt: skip
