"""One supervised child process: started with a lifeline, restarted when it crashes, stopped with its whole group."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In the child: be told to stop when the supervisor dies, however it dies."""
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@dataclass
class Child:
    """A child process by name; `env` is complete, `ready` is a file that it touches once it serves."""

    name: str
    argv: Sequence[str]
    env: dict[str, str]
    log: Path
    lifeline: int
    ready: Path | None = None
    on_restart: Callable[[str, int], None] = lambda name, code: None
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    _task: asyncio.Task[None] | None = field(default=None, repr=False)
    _stopping: bool = False

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.returncode is None else None

    async def start(self) -> None:
        await self._spawn()
        self._task = asyncio.create_task(self._keep())

    async def _spawn(self) -> None:
        if self.ready:
            self.ready.unlink(missing_ok=True)
        with self.log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                env=self.env | {"STOKER_LIFELINE_FD": str(self.lifeline)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(self.lifeline,),
                preexec_fn=die_with_parent,
            )

    async def _keep(self) -> None:
        """Restart after a crash; the pause doubles up to five seconds while it keeps crashing."""
        pause = 0.1
        while not self._stopping:
            assert self.process is not None
            began = time.monotonic()
            code = await self.process.wait()
            if self._stopping:
                return
            pause = 0.1 if time.monotonic() - began > 30 else min(5.0, pause * 2)
            self.restarts += 1
            self.on_restart(self.name, code)
            await asyncio.sleep(pause)
            if not self._stopping:
                await self._spawn()

    async def stop(self) -> None:
        """TERM, then after a grace KILL to the whole group."""
        self._stopping = True
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        process = self.process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            await process.wait()
