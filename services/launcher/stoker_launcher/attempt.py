"""One attempt on this node, from accepted to done: each step is in the ledger before it acts, so any may repeat."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker_chassis.device import Devices
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import BlobStore
from stoker_chassis.warm import WarmWorker, WarmWorkerGone
from stoker_proto import (
    AttemptExited,
    AttemptPrepared,
    AttemptReleased,
    AttemptStarted,
    LogsSealed,
    RankExit,
    StopReason,
)

from .checkpoint import newest
from .facts import Facts
from .ledger import Entry, Ledger
from .outcome import classify
from .output import Output
from .plan import Places, Process, Rendezvous, key_of, plan
from .ports import free_port
from .reports import Reports
from .settings import LauncherSettings
from .workspace import BadTree, code_tree

POLL_S = 0.02
TAIL_LINES = 40
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "USER")
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
        self._grace_ms = self.assignment.grace_ms
        if entry.stopping:
            self._stop.set()

    def stop(self, reason: StopReason, grace_ms: int) -> None:
        """Ask it to end. The first reason counts."""
        if not self._stop.is_set():
            self._grace_ms = grace_ms
            self._note(stopping=reason)
            self._stop.set()

    def _note(self, **changes: object) -> None:
        self.entry = self.entry.model_copy(update=changes)
        self.tools.ledger.write(self.entry)

    async def run(self) -> None:
        """To the end, from wherever the ledger says it stands."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.entry.phase in ("accepted", "prepared"):
            meet = await self._prepared()
            if meet is None:
                await self._end_unstarted()
                return
            await self._start(meet)
        if self.entry.phase == "starting":
            await self._fork()
            await self._watch()
        await self._finish()

    # Before the ranks run

    async def _prepared(self) -> Rendezvous | None:
        """Everything in place on every node of the gang; None when it was stopped or rejected before."""
        a = self.assignment
        try:
            await self._fetch()
        except (KeyError, BadTree) as error:
            detail = f"the code tree {a.code} cannot be used: {error}"
            self._note(exit=self._exited(outcome="launch_rejected", detail=detail))
            return None
        if self.entry.phase == "accepted":
            if a.head.node == self.node:
                found = newest(self.checkpoints) if self._resumes() else None
                self._note(
                    phase="prepared",
                    master_port=free_port(self.tools.settings.address, self.entry.name),
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
            # Nobody else to wait for: start at once, and tell meanwhile.
            telling = asyncio.create_task(self.tools.reports.say(event, *self._key()))
            telling.add_done_callback(lambda t: None if t.cancelled() else t.result())
            assert self.entry.master_port is not None
            return Rendezvous(
                self.tools.settings.address, self.entry.master_port, self.entry.resume_path, self.entry.resume_step
            )
        await self.tools.reports.say(event, *self._key())
        return await self._gang()

    async def _fetch(self) -> None:
        cache = self.tools.settings.node_dir / "code"
        while self.assignment.code is not None:
            try:
                await code_tree(self.assignment.code, self.tools.blobs, cache)
            except Unavailable as error:
                log.warning("%s: %s", self.entry.name, error)
                await asyncio.sleep(0.5)
            else:
                return

    def _resumes(self) -> bool:
        asked = self.assignment.spec.outputs.checkpoints
        return asked is not None and asked.resume == "auto"

    async def _gang(self) -> Rendezvous | None:
        facts = self.tools.facts
        await facts.learn(self.assignment)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set():
                news = asyncio.create_task(facts.news())
                meet = facts.rendezvous(self.assignment)
                if meet is not None:
                    news.cancel()
                    return meet
                await asyncio.wait([news, stopped], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            return None
        finally:
            stopped.cancel()

    async def _end_unstarted(self) -> None:
        if self.entry.exit is None:
            reason = self.entry.stopping or "lost"
            self._note(exit=self._exited(outcome=classify((), reason), asked=reason))
        assert self.entry.exit is not None
        await self.tools.reports.say(self.entry.exit, *self._key())
        await self._say_released("no process was started")
        self._done()

    # While they run

    def _places(self) -> Places:
        code = self.tools.settings.node_dir / "code" / self.assignment.code if self.assignment.code else self.folder
        return Places(str(self.folder), str(code), str(self.checkpoints), str(self.folder / "parameters.json"))

    def _processes(self, meet: Rendezvous) -> tuple[Process, ...]:
        inherited = {k: os.environ[k] for k in INHERITED if k in os.environ}
        return plan(self.assignment, self.node, meet, self._places(), inherited)

    def _ranks(self) -> tuple[int, ...]:
        return tuple(p.rank for p in self._processes(Rendezvous("", 0)))

    async def _start(self, meet: Rendezvous) -> None:
        """Note who is asked to fork and then fork. From the note on, a restart must ask that worker what runs."""
        while True:
            try:
                await self.tools.worker.ready(120)
                self._note(phase="starting", worker=await self.tools.worker.pid(), meet=meet)
            except WarmWorkerGone as error:
                log.warning("%s", error)
            else:
                return

    async def _fork(self) -> None:
        """Fork every rank, once however often this is called, and say so. Without our worker there is nothing to do."""
        meet = self.entry.meet
        assert meet is not None
        if not await self._worker_lives():
            return
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        (self.folder / "parameters.json").write_text(json.dumps(self.assignment.spec.parameters))
        try:
            for process in self._processes(meet):
                await self._spawn(process)
        except WarmWorkerGone:
            return
        a = self.assignment
        event = AttemptStarted(
            job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence, ranks=self._ranks(),
            resume_step=meet.resume_step,
        )  # fmt: skip
        await self.tools.reports.say(event, *self._key())

    async def _spawn(self, process: Process) -> None:
        base = self.folder / f"rank-{process.rank}"
        pid = await self.tools.worker.spawn(
            key_of(self.assignment, process.rank),
            script=Path(process.script) if process.script else None,
            argv=process.argv or None,
            args=process.args,
            env=dict(process.env) | self.tools.devices.environment(process.gpus),
            cwd=Path(self._places().code_dir),
            stdout=base.with_suffix(".stdout"),
            stderr=base.with_suffix(".stderr"),
            error_file=base.with_suffix(".error"),
            exit_file=base.with_suffix(".exit"),
        )
        for gpu in process.gpus:
            self.tools.devices.opened(gpu, pid)

    async def _watch(self) -> None:
        """Until every rank is gone: by itself, because a neighbour failed, or because it was told to stop."""
        ranks = self._ranks()
        output = self._output(ranks)
        pumping = asyncio.create_task(output.pump())
        try:
            ended, alone = await self._until_gone(ranks)
        finally:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)
        exits = tuple(self._rank_exit(rank) for rank in ended)
        asked = self.entry.stopping if len(alone) < len(ranks) else None
        if asked and any(e.code != 0 for e in exits if e.rank in alone):
            asked = None  # it failed before it could obey
        lost = [r for r in ranks if r not in ended]
        if lost:
            exit = self._exited("infra_node", detail="the node's warm worker died and took the ranks with it")
        else:
            own = tuple(e for e in exits if e.rank in alone)
            outcome = classify(own if asked is None and own else exits, asked)
            exit = self._exited(outcome, ranks=exits, asked=asked, before_stop=alone)
        self._note(phase="exited", exit=exit)

    async def _until_gone(self, ranks: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """Ranks in the order in which they ended, and those among them that nobody had told to."""
        killed_at: float | None = None
        termed_at: float | None = None
        failed_at: float | None = None
        alone: tuple[int, ...] = ()
        checked = 0.0
        while True:
            ended = self._ended(ranks)
            now = time.monotonic()
            if termed_at is None:
                alone = tuple(ended)
            if len(ended) == len(ranks):
                await self._sweep(ranks)
                return ended, alone
            if now - checked > 1.0:
                checked = now
                if not await self._worker_lives():
                    return self._ended(ranks), alone
            if failed_at is None and any(self._exit_code(r) != 0 for r in ended):
                failed_at = now
            settled = failed_at is not None and now - failed_at >= self.tools.settings.settle_seconds
            if termed_at is None and (self._stop.is_set() or settled):
                termed_at = now
                await self._signal(ranks, signal.SIGTERM)
            grace = self._grace_ms / 1000 if self._stop.is_set() and failed_at is None else 0.0
            if termed_at is not None and killed_at is None and now - termed_at >= grace:
                killed_at = now
                await self._signal(ranks, signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        times = {}
        for rank in ranks:
            path = self.folder / f"rank-{rank}.exit"
            if path.exists():
                times[rank] = path.stat().st_mtime_ns
        return sorted(times, key=lambda r: (times[r], r))

    def _exit_code(self, rank: int) -> int | None:
        code: int | None = json.loads((self.folder / f"rank-{rank}.exit").read_text())["code"]
        return code

    async def _worker_lives(self) -> bool:
        """Whether the worker that forked our ranks still runs; a new one knows nothing of them."""
        try:
            return await self.tools.worker.pid() == self.entry.worker
        except WarmWorkerGone:
            return False

    async def _signal(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            try:
                await self.tools.worker.kill(key_of(self.assignment, rank), number)
            except WarmWorkerGone:
                return

    async def _sweep(self, ranks: Sequence[int]) -> None:
        """Kill whatever the ranks left running, and wait until it is gone."""
        for rank in ranks:
            key = key_of(self.assignment, rank)
            try:
                while (await self.tools.worker.poll(key)).group:
                    await self.tools.worker.kill(key, signal.SIGKILL)
                    await asyncio.sleep(POLL_S)
            except WarmWorkerGone:
                return

    def _rank_exit(self, rank: int) -> RankExit:
        base = self.folder / f"rank-{rank}"
        ended = json.loads(base.with_suffix(".exit").read_text())
        error_file, stderr = base.with_suffix(".error"), base.with_suffix(".stderr")
        told = json.loads(error_file.read_text()) if error_file.exists() else {}
        return RankExit(
            rank=rank,
            code=ended["code"],
            signal=ended["signal"],
            error_type=told.get("type"),
            error="\n".join(told["traceback"]) if told else None,
            stderr_tail=tuple(tail_of(stderr)),
        )

    # After they have gone

    def _output(self, ranks: Sequence[int]) -> Output:
        return Output(self.assignment, self.node, self.folder, self.checkpoints, ranks, self.tools.reports)

    async def _finish(self) -> None:
        assert self.entry.exit is not None
        if self.entry.phase == "exited":
            await self.tools.reports.say(self.entry.exit, *self._key())
            proof = await self._proof()
            await self._say_released(proof)
            self._note(phase="released")
        output = self._output(self._ranks())
        await output.finish()
        a = self.assignment
        streams = await output.seal(self.tools.blobs)
        event = LogsSealed(job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence, streams=streams)
        await self.tools.reports.say(event, *self._key())
        self._done()
        for rank in self._ranks():
            try:
                await self.tools.worker.forget(key_of(a, rank))
            except WarmWorkerGone:
                return

    async def _proof(self) -> str:
        """Wait until no process of ours holds the GPUs, and say how we know."""
        gpus = self.assignment.here(self.node).gpus
        while True:
            holders = [self.tools.devices.holders(gpu) for gpu in gpus]
            if not any(holders):
                told = "no process holds the GPUs" if None not in holders else "the driver does not tell who holds them"
                return f"process groups gone; {told}"
            await asyncio.sleep(0.1)

    async def _say_released(self, proof: str) -> None:
        a = self.assignment
        event = AttemptReleased(job_id=a.job_id, attempt=a.attempt, node=self.node, fence=a.fence, proof=proof)
        await self.tools.reports.say(event, *self._key())

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


def tail_of(path: Path, limit: int = 32 * 1024) -> list[str]:
    """The last lines of a file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return [line[:2000] for line in file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]]
