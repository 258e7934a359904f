"""A launcher as its own process on a real nats-server, with simulated GPUs and a warm worker that preloads nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stoker_chassis.stores import Bus
from stoker_proto import (
    Allocation,
    Assignment,
    AttemptExited,
    AttemptReleased,
    Event,
    LogBatch,
    LogsSealed,
    MetricBatch,
    NodeAssignments,
    Recorded,
    subjects,
)
from tests.builders import spec
from tests.waiting import until as until_within

E = TypeVar("E", bound=Event)
WAIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    await until_within(condition, WAIT_S)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class LauncherNode:
    """One node: its launcher process, and what the scheduler would have it run."""

    bus: Bus
    url: str
    data: Path
    name: str = "n1"
    gpus: int = 2
    settings: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    wanted: dict[tuple[str, int], Assignment] = field(default_factory=dict)
    seq: int = 0

    def __post_init__(self) -> None:
        self._kept, self._lifeline = os.pipe()
        self.node_dir = self.data / "nodes" / self.name

    async def start(self) -> None:
        ready = self.data / f"{self.name}.ready"
        ready.unlink(missing_ok=True)
        env = os.environ | {
            "STOKER_NATS_URL": self.url, "STOKER_DATA_DIR": str(self.data), "STOKER_NODE": self.name,
            "STOKER_BOOT_EPOCH": "b1", "STOKER_SIM_DIR": str(self.data / "sim"), "STOKER_SIM_GPUS": str(self.gpus),
            "STOKER_PRELOAD": "", "STOKER_READY_FILE": str(ready), "STOKER_LIFELINE_FD": str(self._kept),
        } | self.settings  # fmt: skip
        self.data.mkdir(parents=True, exist_ok=True)
        with (self.data / f"{self.name}.log").open("ab") as out:
            argv = [sys.executable, "-m", "stoker_launcher"]
            self.process = subprocess.Popen(argv, env=env, stdout=out, stderr=out, pass_fds=(self._kept,))
        await until(lambda: ready.exists() or self.process is None or self.process.poll() is not None)
        assert ready.exists(), (self.data / f"{self.name}.log").read_text()[-4000:]

    def kill(self) -> None:
        """kill -9."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def restart(self) -> None:
        self.kill()
        await self.start()

    def close(self) -> None:
        """End the launcher, and through the lifeline everything that it left running."""
        self.kill()
        for fd in (self._kept, self._lifeline):
            os.close(fd)

    def worker_pid(self) -> int:
        return int((self.node_dir / "warm.lock").read_text())

    # What the scheduler does

    async def place(
        self, job_id: str, files: dict[str, str] | None = None, *, fence: int | None = None, want: str = "run",
        code: str | None = None, gpus: int | None = None, allocations: tuple[Allocation, ...] | None = None,
        preflight: str = "fresh", attempt: int = 1, stop_reason: str | None = None, **spec_fields: Any,
    ) -> Assignment:  # fmt: skip
        """Give the node one more attempt, with these files as its code."""
        end = await self.bus.log.end()
        self.seq = max(self.seq + 1, end)
        gpus = gpus or self.gpus
        if files is not None:
            code = await self.put_code(files)
        whole = allocations or (self.allocation(0, gpus),)
        made = Assignment.model_validate({
            "job_id": job_id, "attempt": attempt, "fence": fence or max(1, end), "want": want, "code": code,
            "spec": spec(nodes=len(whole), per_node=gpus, **spec_fields), "allocations": whole, "preflight": preflight,
            "stop_reason": stop_reason, "grace_ms": 5000,
        })  # fmt: skip
        self.wanted[job_id, attempt] = made
        await self.publish()
        return made

    def allocation(self, node_rank: int, gpus: int, first: int = 0) -> Allocation:
        uuids = tuple(f"SIM-{self.name}-{i}" for i in range(first, first + gpus))
        return Allocation(node=self.name, boot_epoch="b1", gpus=uuids, node_rank=node_rank)

    async def stop(self, job_id: str, reason: str, grace_ms: int = 5000, attempt: int = 1) -> None:
        changed = {"want": "stop", "stop_reason": reason, "grace_ms": grace_ms}
        self.wanted[job_id, attempt] = self.wanted[job_id, attempt].model_copy(update=changed)
        self.seq += 1
        await self.publish()

    async def withdraw(self, job_id: str, attempt: int = 1) -> None:
        del self.wanted[job_id, attempt]
        self.seq += 1
        await self.publish()

    async def publish(self) -> None:
        wanted = NodeAssignments(node=self.name, seq=self.seq, attempts=tuple(self.wanted.values()))
        await self.bus.assignments.put(self.name, wanted.model_dump_json().encode())

    async def put_code(self, files: dict[str, str]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "code.tar.gz"
            with tarfile.open(archive, "w:gz") as tar:
                for name, text in files.items():
                    path = Path(folder) / "file"
                    path.write_text(text)
                    tar.add(path, arcname=name)
            return await self.bus.blobs.put(archive)

    # What came of it

    async def happens(self, kind: type[E], job_id: str, attempt: int = 1) -> E:
        """The event of this kind of the attempt on this node, as soon as it is in the log."""
        async with asyncio.timeout(WAIT_S):
            async for recorded in self.bus.log.follow():
                if isinstance(recorded.event, kind) and self._mine(recorded, job_id, attempt):
                    return recorded.event
        raise AssertionError("unreachable")

    def _mine(self, recorded: Recorded, job_id: str, attempt: int) -> bool:
        event: Any = recorded.event
        return bool(
            getattr(event, "job_id", None) == job_id
            and getattr(event, "attempt", attempt) == attempt
            and getattr(event, "node", self.name) == self.name
        )

    async def ends(self, job_id: str, attempt: int = 1) -> AttemptExited:
        """How it ended, once nothing is left to do for it."""
        await self.happens(LogsSealed, job_id, attempt)
        return await self.happens(AttemptExited, job_id, attempt)

    async def releases(self, job_id: str) -> AttemptExited:
        await self.happens(AttemptReleased, job_id)
        return await self.happens(AttemptExited, job_id)

    async def events(self, job_id: str) -> list[Event]:
        return [r.event async for r in self.bus.log.read(0, subjects.job_events(job_id))]

    async def kinds(self, job_id: str) -> list[str]:
        return [type(e).__name__ for e in await self.events(job_id)]

    async def lines(self, job_id: str, rank: int = 0, stream: str = "stdout") -> list[str]:
        """The shipped lines of one stream; batches must follow each other without gap or repeat."""
        got: list[str] = []
        async for sample in self.bus.telemetry.follow(subjects.logs(job_id), wait=False):
            batch = LogBatch.model_validate_json(sample.payload)
            if (batch.rank, batch.stream) == (rank, stream):
                assert batch.first == len(got), f"batch starts at {batch.first} after {len(got)} lines"
                got += batch.lines
        return got

    async def sealed(self, job_id: str, stream: str) -> list[str]:
        """The lines of one stream as they were kept for good."""
        (found,) = (s for s in (await self.happens(LogsSealed, job_id)).streams if s.stream == stream)
        into = self.data / f"sealed-{stream}"
        await self.bus.blobs.get(found.digest, into)
        return into.read_text().splitlines()

    async def points(self, job_id: str) -> list[MetricBatch]:
        follow = self.bus.telemetry.follow(subjects.metrics(job_id), wait=False)
        return [MetricBatch.model_validate_json(s.payload) async for s in follow]

    async def line_comes(self, job_id: str, line: str, rank: int = 0) -> None:
        """Wait until the rank has written this line into its file."""
        files = list(self.node_dir.glob(f"attempts/{job_id}-*/rank-{rank}.stdout"))

        def written() -> bool:
            files[:] = self.node_dir.glob(f"attempts/{job_id}-*/rank-{rank}.stdout")
            return any(line in f.read_text() for f in files)

        await until(written)


@contextlib.asynccontextmanager
async def launched(bus: Bus, url: str, data: Path, name: str = "n1", **settings: str) -> AsyncIterator[LauncherNode]:
    """A node with its launcher up."""
    node = LauncherNode(bus, url, data, name, settings=settings)
    try:
        await node.start()
        yield node
    finally:
        node.close()
