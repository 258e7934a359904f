"""How the API refuses: one Problem for everything, from a mistyped path to a fault of ours."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from stoker_chassis.clock import new_id
from stoker_chassis.eventlog import Refused, Unavailable
from stoker_proto import FieldError, Problem, ProblemError, problem

log = logging.getLogger(__name__)


def answer(told: Problem, request: Request) -> Response:
    headers = {"X-Request-Id": request.state.request_id} if hasattr(request.state, "request_id") else {}
    if told.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(told.retry_after_s)))
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = told.model_copy(update={"instance": told.instance or request.url.path})
    content = body.model_dump_json(exclude_none=True)
    return Response(content, told.status, headers, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    """Turn every way of failing into a Problem."""

    @app.middleware("http")
    async def name_request(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        request.state.request_id = new_id()
        try:
            response = await call_next(request)
        except Exception:
            log.exception("request %s failed", request.state.request_id)
            told = problem("internal", f"The request failed on our side; its id is {request.state.request_id}")
            return answer(told, request)
        response.headers["X-Request-Id"] = request.state.request_id
        return response

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
            FieldError(pointer="/" + "/".join(map(str, e["loc"])), code="invalid", message=e["msg"])
            for e in error.errors()
        )
        return answer(problem("invalid_request", f"{len(errors)} mistake(s) in the request", errors=errors), request)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            return answer(problem("method_not_allowed", f"{request.url.path} does not take {request.method}"), request)
        if error.status_code == 404:
            return answer(problem("not_found", f"There is nothing at {request.url.path}"), request)
        return answer(problem("invalid_request", str(error.detail)), request)
