"""A wire to a server that can lose what the server answers, so that a sender cannot know if it was heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class LossyWire:
    """Passes bytes both ways; while `mute`, the server's answers are lost."""

    def __init__(self, url: str) -> None:
        self.mute = False
        self.url = ""
        self._port = urlsplit(url).port

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            upstream, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            back = asyncio.create_task(self._pump(upstream, writer, answers=True))
            try:
                await self._pump(reader, to_server, answers=False)
            finally:
                back.cancel()
                to_server.close()
                writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await source.read(1 << 16):
            if not (answers and self.mute):
                sink.write(data)
                await sink.drain()


@contextlib.asynccontextmanager
async def lossy_wire(url: str) -> AsyncIterator[LossyWire]:
    wire = LossyWire(url)
    server = await wire.serve()
    try:
        yield wire
    finally:
        server.close()
