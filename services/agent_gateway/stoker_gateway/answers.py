"""How the API lets in and refuses: one Problem for everything, from a mistyped path to a fault of ours."""

from __future__ import annotations

import logging
import secrets

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_chassis.clock import new_id
from stoker_chassis.eventlog import Refused, Unavailable
from stoker_proto import FieldError, Problem, ProblemError, problem

from .reading import code_of, pointer_of

PRINCIPAL = "user/admin"
OPEN = ("/healthz", "/readyz")
PROBLEM = "application/problem+json"
log = logging.getLogger(__name__)


def answer(told: Problem, request: Request) -> Response:
    headers = {}
    if told.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(told.retry_after_s)))
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = told.model_copy(update={"instance": told.instance or request.url.path})
    content = body.model_dump_json(exclude_none=True)
    return Response(content, told.status, headers, media_type=PROBLEM)


class Gate:
    """The first to see a request: names it, asks for the token before anything is read, and answers for what breaks."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, name, begun = Request(scope, receive), new_id(), False

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            self._admit(request)
            await self._app(scope, receive, named)
        except ProblemError as error:
            await answer(error.problem, request)(scope, receive, named)
        except ClientDisconnect:
            log.info("%s %s: the client went away", request.method, request.url.path)
        except Exception:
            if begun:  # too late for a Problem; the client sees a stream that was cut off
                raise
            log.exception("request %s failed: %s %s", name, request.method, request.url.path)
            told = problem("internal", f"The request failed on our side; its id is {name}", facts={"request_id": name})
            await answer(told, request)(scope, receive, named)

    def _admit(self, request: Request) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        known = bool(self._token) and secrets.compare_digest(given.strip().encode(), self._token)
        if request.url.path not in OPEN and not (known and scheme.lower() == "bearer"):
            told = "Send the header `Authorization: Bearer <token>`; the local system keeps its token in stoker.json"
            raise ProblemError(problem("unauthorized", told))
        request.state.principal = PRINCIPAL


def install(app: FastAPI, token: str) -> None:
    """Turn every way of failing into a Problem."""
    app.add_middleware(Gate, token=token)

    @app.exception_handler(ProblemError)
    async def told(request: Request, error: ProblemError) -> Response:
        return answer(error.problem, request)

    @app.exception_handler(Unavailable)
    async def away(request: Request, error: Unavailable) -> Response:
        return answer(problem("log_unavailable", str(error), retry_after_s=2), request)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return answer(problem("invalid_request", str(error)), request)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = tuple(
            FieldError(pointer=pointer_of(e["loc"]), code=code_of(e["type"]), message=e["msg"]) for e in error.errors()
        )
        return answer(problem("invalid_request", f"{len(errors)} mistake(s) in the request", errors=errors), request)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            made = problem("method_not_allowed", f"{request.url.path} does not take {request.method}")
        elif error.status_code == 404:
            made = problem("not_found", f"There is nothing at {request.url.path}")
        else:
            made = problem("invalid_request", str(error.detail))
        response = answer(made, request)
        response.headers.update(error.headers or {})
        return response
