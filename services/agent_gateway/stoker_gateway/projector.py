"""Follows the log into the read model, a burst a transaction; a log that is not the one it knew makes it start anew."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from stoker_chassis.eventlog import Diverged, EventLog, Position
from stoker_proto import Recorded

from .store import Views

BURST = 500
log = logging.getLogger(__name__)


async def project(source: EventLog, views: Views, ready: Callable[[], None]) -> None:
    """For ever. `ready` is called once the model holds everything that the log held at the start."""
    while True:
        try:
            await _project(source, views, ready)
        except Diverged as error:
            log.error("the log is not the one that the read model came from (%s); rebuilding", error)
            views.clear()


async def _project(source: EventLog, views: Views, ready: Callable[[], None]) -> None:
    end = await source.end()
    position = views.position()
    buffer: deque[Recorded] = deque()
    arrived, room = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async for recorded in source.follow(position):
            buffer.append(recorded)
            arrived.set()
            while len(buffer) >= BURST:
                room.clear()
                await room.wait()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: arrived.set())
    try:
        if await _up_to_date(source, position, end):
            ready()
        while True:
            await arrived.wait()
            arrived.clear()
            if reading.done():
                reading.result()
            burst = list(buffer)
            buffer.clear()
            room.set()
            if burst:
                # SQLite takes a fraction of a millisecond: a thread would cost more than it frees.
                views.fold(burst)
                await views.announce(burst[-1].seq)
                if burst[0].seq <= end <= burst[-1].seq:
                    ready()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _up_to_date(source: EventLog, position: Position, end: int) -> bool:
    """Whether the model already holds this log up to its end, and not as much of another one."""
    if position.seq != end or end == 0:
        return position.seq == end
    async for recorded in source.read(end - 1):
        return recorded.envelope.id == position.event_id
    return False
