"""What a request handler is given: the bus, the read model, and who asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import Bus

from .store import Views

READ_S = 15.0
READ_YOUR_WRITES_S = 2.0


@contextlib.asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """For reads of the log, which wait for a server that is away: a request does not wait for ever."""
    try:
        async with asyncio.timeout(READ_S):
            yield
    except TimeoutError as error:
        raise Unavailable(f"the log did not answer within {READ_S:.0f} s") from error


async def caught_up(bus: Bus, views: Views) -> None:
    """Wait until the read model holds what the log holds now. Raises Unavailable when it does not get there."""
    if not await views.reached(await bus.log.end(), READ_YOUR_WRITES_S):
        raise Unavailable("the read model is behind the log; what it says now may be old")


def bus_of(request: Request) -> Bus:
    bus: Bus = request.app.state.bus
    return bus


def views_of(request: Request) -> Views:
    views: Views = request.app.state.views
    return views


BusOf = Annotated[Bus, Depends(bus_of)]
ViewsOf = Annotated[Views, Depends(views_of)]


def principal_of(request: Request) -> str:
    principal: str = request.state.principal
    return principal


PrincipalOf = Annotated[str, Depends(principal_of)]
