"""The HTTP application: built from a bus and a read model, so that tests build it from their own."""

from __future__ import annotations

from fastapi import FastAPI

from stoker_chassis.stores import Bus
from stoker_proto import Problem

from . import answers, blobs, cluster, explanation, feeds, jobs, nodes, requests
from .store import Views


def create_app(bus: Bus, views: Views, token: str) -> FastAPI:
    """The API. Every path but /healthz and /readyz needs `token` as a bearer token."""
    app = FastAPI(
        title="Stoker",
        version="1",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        responses={"default": {"description": "Refused: a Problem (RFC 9457)", "model": Problem}},
    )
    app.state.bus, app.state.views = bus, views
    answers.install(app, token)
    for part in (jobs, requests, explanation, feeds, nodes, cluster, blobs):
        app.include_router(part.router)

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
