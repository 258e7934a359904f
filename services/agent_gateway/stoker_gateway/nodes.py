"""/v1/nodes: what the cluster is made of, and how well it is."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from stoker_chassis.clock import stamp
from stoker_proto import ProblemError, RetestRequested, problem

from .given import BusOf, PrincipalOf, ViewsOf
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
    return views.node(node) or view
