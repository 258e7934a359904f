"""Client of a warm worker: spawn, watch and kill processes that it forks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal as signals
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_S = 30.0


class WarmWorkerGone(Exception):
    """Nothing answers on the worker's socket. Whether it is dead, and its children with it, only `dead` tells."""


class WarmWorkerSilent(WarmWorkerGone):
    """It took the request and did not answer in time."""


@dataclass(frozen=True)
class Exit:
    """How a child ended: exactly one of the two is set."""

    code: int | None
    signal: int | None


@dataclass(frozen=True)
class Status:
    """A child as the worker sees it. `group` is true while any process of its group is left."""

    known: bool
    exit: Exit | None
    group: bool


class WarmWorker:
    """Speaks to the warm worker on a unix socket. Raises WarmWorkerGone when it does not answer."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError as error:
            raise WarmWorkerSilent(f"{self._socket} did not answer within {ANSWER_S:.0f} s") from error
        except OSError as error:
            raise WarmWorkerGone(f"{self._socket}: {error}") from error
        if not line:
            raise WarmWorkerGone(f"{self._socket} hung up")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def identity(self) -> str:
        """Which worker this is: one that was started again is another one, and knows nothing of earlier children."""
        return str((await self._ask({"do": "ping"}))["identity"])

    def dead(self) -> bool:
        """Whether no worker lives: a proof, by its lock, which a worker that only does not answer never gives."""
        try:
            with self._lock_file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True

    def end(self) -> None:
        """Kill a worker that lives but does not answer."""
        if not self.dead():
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(self._lock_file.read_text()), signals.SIGKILL)

    @property
    def _lock_file(self) -> Path:
        return self._socket.with_suffix(".lock")

    async def ready(self, seconds: float) -> None:
        """Wait until the worker has imported everything and serves. Raises WarmWorkerGone after that time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.identity()
            except WarmWorkerGone:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
            else:
                return

    async def spawn(
        self,
        key: str,
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
        script: Path | None = None,
        argv: Sequence[str] | None = None,
        args: Sequence[str] = (),
        error_file: Path | None = None,
        exit_file: Path | None = None,
    ) -> int:
        """Fork a child that runs a Python `script` or executes `argv`; its pid, also its group. Once per key."""
        request = {
            "do": "spawn",
            "key": key,
            "env": dict(env),
            "cwd": str(cwd),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "script": str(script) if script else None,
            "argv": list(argv) if argv else None,
            "args": list(args),
            "error_file": str(error_file) if error_file else None,
            "exit_file": str(exit_file) if exit_file else None,
        }
        return int((await self._ask(request))["pid"])

    async def poll(self, key: str) -> Status:
        answer = await self._ask({"do": "poll", "key": key})
        ended = answer["exit"]
        return Status(answer["known"], Exit(ended["code"], ended["signal"]) if ended else None, answer["group"])

    async def kill(self, key: str, signal: int, *, group: bool = True) -> bool:
        """Signal the child's whole process group, or the child alone; false when nothing of it is left."""
        return bool((await self._ask({"do": "kill", "key": key, "signal": signal, "group": group}))["sent"])

    async def forget(self, key: str) -> None:
        """Drop what is remembered of a child that is gone."""
        await self._ask({"do": "forget", "key": key})
