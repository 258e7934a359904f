"""Wires the gateway: the read model's projector and the HTTP server beside each other."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn
from sse_starlette.sse import AppStatus

from stoker_chassis.hosting import host
from stoker_chassis.stores import Bus

from .app import create_app
from .projector import project
from .settings import GatewaySettings
from .store import Views, open_engine


class Server(uvicorn.Server):
    """uvicorn that says when it has started, and lets go of those who follow when it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        AppStatus.should_exit = True
        await super().shutdown(sockets)


async def serve(bus: Bus, ready: Callable[[], None], settings: GatewaySettings) -> None:
    views = Views(open_engine(settings.database_path))
    caught_up = asyncio.Event()
    config = uvicorn.Config(
        create_app(bus, views, settings.token),
        host=settings.host,
        port=settings.port,
        log_level=logging.WARNING,
        timeout_graceful_shutdown=2,
        access_log=False,
    )
    server = Server(config)

    async def announce() -> None:
        await caught_up.wait()
        await server.up.wait()
        ready()

    # Not serve(): the host handles the signals. Not in the group: it ends in its own way, after the requests it has.
    serving = asyncio.create_task(server._serve())
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(project(bus.log, views, caught_up.set))
            tasks.create_task(announce())
            await asyncio.shield(serving)
            raise RuntimeError("the HTTP server has ended by itself")
    finally:
        server.should_exit = True
        await asyncio.wait({serving})


def main() -> None:
    settings = GatewaySettings()
    host("gateway", settings, lambda bus, ready: serve(bus, ready, settings))


if __name__ == "__main__":
    main()
