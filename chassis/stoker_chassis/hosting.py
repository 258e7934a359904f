"""The process around a service: FastStream holds the connection, the signals and the life cycle.

The service's own loop runs as a task between the start of the application and its stop. It ends by SIGTERM or SIGINT
(exit 0), or with an error, which is logged and exits 1, so that whoever supervises the process starts it again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import cast

from faststream import FastStream
from faststream.nats import NatsBroker
from nats.errors import Error as NatsError

from .jetstream import bus_on, connected_within
from .settings import Settings
from .stores import Bus
from .telemetry import set_up

GOODBYE_S = 8.0
Main = Callable[[Bus, Callable[[], None]], Awaitable[None]]
log = logging.getLogger(__name__)


def host(service: str, settings: Settings, main: Main) -> None:
    """Run `main(bus, ready)` as a service; `ready()` tells the supervisor that it serves. Ends the process."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    set_up(service, settings.instance, settings.otlp_endpoint)
    relax_collector()
    if lifeline := os.environ.get("STOKER_LIFELINE_FD"):
        threading.Thread(target=_end_with, args=(int(lifeline),), name="lifeline", daemon=True).start()
    failed = asyncio.run(_hosted(service, settings, main))
    sys.exit(1 if failed else 0)


def _end_with(lifeline: int) -> None:
    """End this process when the supervisor is gone: asked first, then for sure, since nobody is left to do it."""
    try:
        os.read(lifeline, 1)
    except OSError as error:
        log.warning("there is no lifeline at %d: %s", lifeline, error)
        return
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GOODBYE_S)
    os._exit(1)


def relax_collector() -> None:
    """Collect garbage less often: folds keep what they make, and looking through it all again halves their speed."""
    gc.set_threshold(50_000, 20, 100)


async def _hosted(service: str, settings: Settings, main: Main) -> bool:
    async def quiet(error: Exception) -> None:
        log.debug("nats: %s", error)

    broker = NatsBroker(
        settings.nats_url,
        name=f"{service}/{settings.instance}",
        max_reconnect_attempts=-1,
        reconnect_time_wait=cast(int, 0.2),  # seconds; nats-py takes fractions, only the annotation does not
        ping_interval=10,
        pending_size=32 * 2**20,
        drain_timeout=2,
        graceful_timeout=2,
        error_cb=quiet,
        logger=None,
    )
    failed = False

    def ready() -> None:
        if settings.ready_file:
            settings.ready_file.parent.mkdir(parents=True, exist_ok=True)
            settings.ready_file.touch()

    async def serve() -> None:
        nonlocal failed
        try:
            await main(await bus_on(await broker.connect()), ready)
        except asyncio.CancelledError:
            raise
        except Exception:
            failed = True
            log.exception("%s failed", service)
        finally:
            app.exit()

    serving: list[asyncio.Task[None]] = []
    ended = False

    async def begin() -> None:
        serving.append(asyncio.create_task(serve()))

    async def end() -> None:
        """Before the connection goes, so that the service can still say its last words."""
        nonlocal ended
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        ended = True

    app = FastStream(broker, logger=None, after_startup=[begin], on_shutdown=[end])
    await connected_within(broker.connect, settings.nats_url)  # FastStream itself would give up at once
    try:
        await app.run(log_level=logging.WARNING)
    except NatsError as error:
        if not ended:
            raise
        log.info("left without a goodbye, the log is away: %s", error)
    return failed
