"""The processes of one attempt on this node: forked once, watched through the files they leave, ended to the last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker_chassis.device import Devices
from stoker_chassis.warm import WarmWorker, WarmWorkerGone
from stoker_proto import RankExit

from .plan import Process

POLL_S = 0.02
TAIL_LINES = 40
# What all ranks of a node may say of their end together; an event must stay far below what the log takes.
TAIL_BYTES = 64 * 1024


class Ranks:
    """The ranks by number, each with its key in the warm worker that `worker_identity` names."""

    def __init__(
        self, folder: Path, keys: dict[int, str], worker: WarmWorker, worker_identity: str, devices: Devices
    ) -> None:
        self._folder = folder
        self._keys = keys
        self._worker = worker
        self._identity = worker_identity
        self._devices = devices

    async def fork(self, processes: Sequence[Process], cwd: Path) -> bool:
        """Fork every rank, once however often this is called. False when the worker is dead, and with it its ranks."""
        for process in processes:
            while True:
                try:
                    if await self._worker.identity() != self._identity:
                        return False
                    await self._spawn(process, cwd)
                except WarmWorkerGone:
                    if self._worker.dead():
                        return False
                    await asyncio.sleep(POLL_S)
                else:
                    break
        return True

    async def _spawn(self, process: Process, cwd: Path) -> None:
        base = self._folder / f"rank-{process.rank}"
        pid = await self._worker.spawn(
            self._keys[process.rank],
            script=Path(process.script) if process.script else None,
            argv=process.argv or None,
            args=process.args,
            env=dict(process.env) | self._devices.environment(process.gpus),
            cwd=cwd,
            stdout=base.with_suffix(".stdout"),
            stderr=base.with_suffix(".stderr"),
            error_file=base.with_suffix(".error"),
            exit_file=base.with_suffix(".exit"),
        )
        noted = base.with_suffix(".pid")
        if not noted.exists():
            noted.write_text(json.dumps({"pid": pid, "began": began(pid)}))
        for gpu in process.gpus:
            self._devices.opened(gpu, pid)

    async def live(self) -> bool:
        """Whether the worker that forked them still lives; they die with it, and a new one knows nothing of them."""
        try:
            return await self._worker.identity() == self._identity
        except WarmWorkerGone:
            return not self._worker.dead()

    def ended(self) -> list[int]:
        """Ranks that have ended, in that order."""
        times = {}
        for rank in self._keys:
            with contextlib.suppress(FileNotFoundError):
                times[rank] = (self._folder / f"rank-{rank}.exit").stat().st_mtime_ns
        return sorted(times, key=lambda r: (times[r], r))

    def failed(self, rank: int) -> bool:
        """Whether a rank that has ended did so in any way but with code 0."""
        return bool(json.loads((self._folder / f"rank-{rank}.exit").read_text())["code"] != 0)

    def unaware(self) -> set[int]:
        """Ranks that were told to stop while the training helper listened, and never looked."""
        files = {rank: self._folder / f"rank-{rank}.stop" for rank in self._keys}
        return {rank for rank, file in files.items() if file.exists() and file.read_text() == "heard"}

    async def signal(self, number: int, *, group: bool = True) -> None:
        """Signal the ranks, each with all that it has started or alone."""
        for key in self._keys.values():
            with contextlib.suppress(WarmWorkerGone):
                await self._worker.kill(key, number, group=group)

    async def sweep(self) -> None:
        """Kill whatever is left of their process groups, and wait until it is gone."""
        for key in self._keys.values():
            while await self._left(key):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        if await self.live():
            return
        # Only the worker's own children die with it; theirs are ended here.
        for rank in self._keys:
            await self._end_group(rank)

    async def _left(self, key: str) -> bool:
        """Kill what is left of a group; whether there was anything. False when the worker is dead."""
        while True:
            try:
                return (await self._worker.poll(key)).group and await self._worker.kill(key, signal.SIGKILL)
            except WarmWorkerGone:
                if self._worker.dead():
                    return False
                await asyncio.sleep(POLL_S)

    async def _end_group(self, rank: int) -> None:
        noted = self._noted(rank)
        while noted and _same(noted) and group_lives(noted["pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(noted["pid"], signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    def ours(self, pids: Iterable[int], marks: Mapping[str, str]) -> list[int]:
        """Those of these processes that belong to the ranks: by their group, or by the environment they began with."""
        groups = {noted["pid"] for rank in self._keys if (noted := self._noted(rank)) and _same(noted)}
        wanted = {f"{name}={value}".encode() for name, value in marks.items()}
        return [pid for pid in pids if _group(pid) in groups or wanted <= _environment(pid)]

    def _noted(self, rank: int) -> dict[str, Any] | None:
        try:
            noted: dict[str, Any] = json.loads((self._folder / f"rank-{rank}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return noted

    async def forget(self) -> None:
        for key in self._keys.values():
            with contextlib.suppress(WarmWorkerGone):
                await self._worker.forget(key)

    def exits(self, ended: Sequence[int]) -> tuple[RankExit, ...]:
        """How these ranks ended, with their last words."""
        limit = TAIL_BYTES // max(1, len(self._keys))
        return tuple(self._exit(rank, limit) for rank in ended)

    def _exit(self, rank: int, limit: int) -> RankExit:
        base = self._folder / f"rank-{rank}"
        ended = json.loads(base.with_suffix(".exit").read_text())
        error_file, stderr = base.with_suffix(".error"), base.with_suffix(".stderr")
        told = json.loads(error_file.read_text()) if error_file.exists() else None
        return RankExit(
            rank=rank,
            code=ended["code"],
            signal=ended["signal"],
            error_type=told["type"] if told else None,
            error="\n".join(told["traceback"])[-limit:] if told else None,
            stderr_tail=tuple(tail_of(stderr, limit)),
        )


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def began(pid: int) -> str | None:
    """When the process began, which tells it from a later one with its number."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _same(noted: Mapping[str, Any]) -> bool:
    """Whether the number of a noted process is still its own, or nobody's."""
    return began(noted["pid"]) in (None, noted["began"])


def lives(pid: int) -> bool:
    """Whether we see such a process at all; the driver may name one of another process namespace."""
    return _stat(pid) is not None


def _group(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[2]) if fields else None


def _environment(pid: int) -> set[bytes]:
    """What the process was executed with; nothing when it is somebody else's to know."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()


def group_lives(group: int) -> bool:
    """Whether a process of the group lives; one that only waits to be reaped does not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == group and fields[0] not in ("Z", "X"):
                return True
    return False


def tail_of(path: Path, limit: int) -> list[str]:
    """The last lines of a file, from its last `limit` bytes."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return [line[:2000] for line in file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]]
