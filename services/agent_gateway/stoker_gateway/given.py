"""What a request handler is given: the bus, the read model, and who asks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from stoker_chassis.stores import Bus

from .store import Views


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
