"""The connection to one gateway: calls that are tried again where that is safe, and streams that outlive it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from stoker_proto import Problem, ProblemError, problem

from .config import find_server
from .sse import parse_sse

RETRY_S = 30.0
FIRST_PAUSE_S = 0.1
RECONNECT_S = 0.2
# Trying the same again helps nobody here: the one needs another look first, the other has been waited for already.
NOT_AGAIN = ("cluster_conflict", "scheduler_unavailable")
log = logging.getLogger(__name__)


class Wire:
    """HTTP with the token, failing with Problems."""

    def __init__(self, url: str | None = None, token: str | None = None, *, retry_seconds: float = RETRY_S) -> None:
        if url is None:
            server = find_server()
            url, token = server.url, token or server.token
        if not url.startswith(("http://", "https://")):
            raise ProblemError(problem("invalid_request", f"{url!r} is no http:// or https:// address of a gateway"))
        self._retry_s = retry_seconds
        headers = {"Authorization": f"Bearer {token or ''}"}
        # A proxy for the world outside must not be asked for a gateway on this machine.
        here: dict[str, None] = {"all://127.0.0.1": None, "all://localhost": None}
        timeout = httpx.Timeout(70, connect=5)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, mounts=here)
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """One call, tried again while the server is away or says that it may be."""
        deadline = time.monotonic() + self._retry_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                response = self._http.request(method, path, **more)
                failed = None if response.is_success else problem_of(response)
            except httpx.TransportError as error:
                failed = _unreachable(self.url, error)
            if failed is None:
                return response
            wait = failed.retry_after_s or pause
            if not failed.retryable or failed.code in NOT_AGAIN or time.monotonic() + wait > deadline:
                raise ProblemError(failed)
            if pause == FIRST_PAUSE_S:
                log.warning("%s; trying again for %.0f s", failed.detail, self._retry_s)
            time.sleep(wait)
            pause = min(2.0, pause * 2)

    def _get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params={k: v for k, v in params.items() if v is not None}).json()

    def _sse(self, path: str, params: dict[str, Any], last: str | None) -> Iterator[tuple[str, str]]:
        """Server-sent events as (event, data) until the server ends the stream, over any number of lost connections."""
        lost_at = time.monotonic()
        while True:
            headers = {"Accept": "text/event-stream"}
            if last:
                headers["Last-Event-ID"] = last
                params = {k: v for k, v in params.items() if k != "tail"}  # what was missed is more than a tail
            timeout = httpx.Timeout(10, read=45)
            try:
                with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
                    if response.is_success:
                        try:
                            for id, name, data in parse_sse(response.iter_lines()):
                                last = id or last
                                yield name, data
                            return
                        finally:
                            lost_at = time.monotonic()
                    response.read()
                    failed = problem_of(response)
            except httpx.TransportError as error:
                failed = _unreachable(self.url, error)
            if not failed.retryable or time.monotonic() - lost_at > self._retry_s:
                raise ProblemError(failed)
            time.sleep(RECONNECT_S)


def problem_of(response: httpx.Response) -> Problem:
    """The Problem in a refusal; one is made for answers that carry none, such as a proxy's."""
    try:
        return Problem.model_validate_json(response.content)
    except ValueError:
        code = "log_unavailable" if response.status_code in (429, 502, 503, 504) else "internal"
        return problem(code, f"HTTP {response.status_code} from {response.request.url}: {response.text[:200]}")


def _unreachable(url: str, error: Exception) -> Problem:
    detail = f"The gateway at {url} cannot be reached: {error or type(error).__name__}"
    return problem("log_unavailable", detail, next_actions=("check that it runs (`stoker up`), then try again",))
