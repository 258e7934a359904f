"""/v1/nodes and /v1/events: what the cluster is and what happens in it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from stoker_chassis.clock import stamp
from stoker_proto import ProblemError, RetestRequested, problem

from .given import BusOf, PrincipalOf, ViewsOf
from .jobs import event_answer
from .submission import SOURCE
from .views import NodeView

router = APIRouter(prefix="/v1", tags=["nodes"])


class NodeList(BaseModel):
    nodes: list[NodeView]


class RetestBody(BaseModel):
    reason: str = ""


@router.get("/nodes")
async def list_nodes(views: ViewsOf) -> NodeList:
    """Every node that ever joined, with its health and what it holds."""
    return NodeList(nodes=views.nodes())


@router.post("/nodes/{node}:retest", status_code=202)
async def retest(
    node: str, bus: BusOf, views: ViewsOf, principal: PrincipalOf, body: RetestBody | None = None
) -> NodeView:
    """Ask for a re-test of the node; a quarantined one is released only when it passes."""
    view = views.node(node)
    if view is None:
        raise ProblemError(problem("not_found", f"There is no node {node}"))
    event = RetestRequested(node=node, reason=body.reason if body else "")
    landed = await bus.log.append(stamp(event, SOURCE, actor=principal))
    await views.reached(landed.seq, 2.0)
    return view


@router.get("/events", response_model=None)
async def all_events(
    request: Request, bus: BusOf, views: ViewsOf, after: int = 0
) -> dict[str, Any] | EventSourceResponse:
    """The log after a sequence: a list, or (Accept: text/event-stream) followed for ever."""
    return await event_answer(request, bus, views, None, after)
