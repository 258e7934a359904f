"""The HTTP application: built from a bus and a read model, so that tests build it from their own."""

from __future__ import annotations

import secrets

from fastapi import Depends, FastAPI, Request

from stoker_chassis.stores import Bus
from stoker_proto import ProblemError, problem

from . import answers, blobs, jobs, nodes
from .store import Views

PRINCIPAL = "user/admin"


def create_app(bus: Bus, views: Views, token: str) -> FastAPI:
    """The API. Every path but /healthz and /readyz needs `token` as a bearer token."""

    async def authorised(request: Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not token or not secrets.compare_digest(given.encode(), token.encode()):
            told = "Send the header `Authorization: Bearer <token>`; the local system keeps its token in stoker.json"
            raise ProblemError(problem("unauthorized", told))
        request.state.principal = PRINCIPAL

    app = FastAPI(title="Stoker", version="1", docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json")
    app.state.bus, app.state.views = bus, views
    answers.install(app)
    for part in (jobs.router, nodes.router, blobs.router):
        app.include_router(part, dependencies=[Depends(authorised)])

    @app.get("/healthz", tags=["system"])
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["system"])
    async def readyz() -> dict[str, int]:
        """The log can be reached; `behind` is how many events the read model has still to fold."""
        end = await bus.log.end()
        return {"end": end, "behind": max(0, end - views.seq)}

    return app
