"""Servers for client tests, each on its own thread: a true gateway on any bus, and one that answers by a script."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import uvicorn

from stoker_chassis.clock import stamp
from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_gateway.app import create_app
from stoker_gateway.projector import project
from stoker_gateway.store import Views, open_engine
from stoker_proto import Event, LogBatch, subjects

TOKEN = "secret"
WAIT_S = 20.0
OpenBus = Callable[[], AbstractAsyncContextManager[Bus]]


class Gateway:
    """A gateway that answers over HTTP while the test goes on; the test plays all other services."""

    def __init__(self, open_bus: OpenBus) -> None:
        self._open_bus = open_bus
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._batches = 0
        self.url = ""

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        engine = open_engine(None)
        async with self._open_bus() as bus:
            self.bus, self._views = bus, Views(engine)
            app = create_app(bus, self._views, TOKEN)
            config = uvicorn.Config(app, port=0, log_level=logging.ERROR, timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            projecting = asyncio.create_task(project(bus.log, self._views, lambda: None))
            serving = asyncio.create_task(server._serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._up.set()
            await self._stop.wait()
            server.should_exit = True
            await serving
            projecting.cancel()
            await asyncio.gather(projecting, return_exceptions=True)
        engine.dispose()

    def __enter__(self) -> Gateway:
        self._thread.start()
        assert self._up.wait(WAIT_S), "the gateway did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)

    def tell(self, *events: Event) -> None:
        """Append events to the log and wait until the gateway has seen them."""

        async def append() -> None:
            for event in events:
                landed = await self.bus.log.append(stamp(event, "test"))
                assert await self._views.reached(landed.seq, WAIT_S)

        asyncio.run_coroutine_threadsafe(append(), self._loop).result(WAIT_S)

    def say(self, job_id: str, *lines: str, rank: int = 0, attempt: int = 1, node: str = "node-1") -> None:
        """Publish log lines of a rank, as its launcher does."""
        first, self._batches = self._batches, self._batches + 1
        batch = LogBatch(
            job_id=job_id, attempt=attempt, node=node, rank=rank, stream="stdout", first=first, lines=lines
        )
        told = self.bus.telemetry.publish(
            subjects.log(job_id, attempt, node, rank), batch.model_dump_json().encode(), f"{job_id}-{first}"
        )
        asyncio.run_coroutine_threadsafe(told, self._loop).result(WAIT_S)


def in_memory(folder: Path) -> OpenBus:
    @contextlib.asynccontextmanager
    async def open_bus() -> AsyncIterator[Bus]:
        yield memory_bus(folder)

    return open_bus


@dataclass(frozen=True)
class Answer:
    """What the scripted server says next; a `status` of 0 hangs up without a word, `cut` hangs up before the end."""

    status: int = 200
    body: str = "{}"
    type: str = "application/json"
    cut: bool = False


@dataclass
class Script:
    """A server that gives its answers in order, the last one for ever, and keeps what it was asked."""

    answers: list[Answer]
    url: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)


@contextlib.contextmanager
def scripted(*answers: Answer) -> Iterator[Script]:
    script = Script(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            script.asked.append((f"{self.command} {self.path}", dict(self.headers)))
            now = script.answers[min(len(script.asked), len(script.answers)) - 1]
            if now.status == 0:
                self.close_connection = True
                return
            body = now.body.encode()
            self.send_response(now.status)
            self.send_header("Content-Type", now.type)
            self.send_header("Content-Length", str(len(body) + now.cut))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = now.cut

        do_GET = do_POST = do_PUT = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join(WAIT_S)
        server.server_close()
