"""The Python client: every call of the API, retried where that is safe, failing with a Problem."""

from __future__ import annotations

import json
import logging
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from stoker_proto import Problem, ProblemError, problem

from .bundle import pack
from .config import find_server
from .overrides import read_text
from .sse import parse_sse

RETRY_S = 30.0
FIRST_PAUSE_S = 0.1
RECONNECT_S = 0.2
log = logging.getLogger(__name__)
Job = dict[str, Any]
Rows = list[dict[str, Any]]
Spec = Path | str | Mapping[str, Any]


class Client:
    """Speaks to one gateway.

    Args:
        url: the gateway's address; without it STOKER_URL, or the local system in ./stoker-data.
        token: the bearer token.
        retry_seconds: how long calls are retried while the gateway cannot be reached. Retries of a submission carry the
            same idempotency key, so that they cannot submit twice.

    Every call raises stoker_proto.ProblemError with the server's Problem.
    """

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

    def __enter__(self) -> Client:
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
            if not failed.retryable or time.monotonic() + wait > deadline:
                raise ProblemError(failed)
            if pause == FIRST_PAUSE_S:
                log.warning("%s; trying again for %.0f s", failed.detail, self._retry_s)
            time.sleep(wait)
            pause = min(2.0, pause * 2)

    def _get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params={k: v for k, v in params.items() if v is not None}).json()

    def validate(self, spec: Spec) -> dict[str, Any]:
        """The spec with its defaults, or a Problem that names every mistake. Nothing is created."""
        body = self._body(spec)
        answer: dict[str, Any] = self._call("POST", "/v1/jobs:validate", json=body).json()
        return answer

    def submit(self, spec: Spec, *, code_root: Path | None = None, idempotency_key: str | None = None) -> Job:
        """Submit a job: validated first, then its code is sent, then it is accepted.

        Args:
            spec: the path of a YAML file, or the spec as a mapping.
            code_root: what code_source.root_path is relative to; by default the folder of the YAML file, or the current
                one for a mapping.
            idempotency_key: the same key and spec give the same job; by default a key of this call alone.
        """
        body = self._body(spec)
        checked = self._call("POST", "/v1/jobs:validate", json=body).json()["spec"]
        source = checked.get("code_source")
        if source is not None:
            base = code_root or (Path.cwd() if isinstance(spec, Mapping) else Path(spec).resolve().parent)
            body["code"] = self._send_code(base / source["root_path"], tuple(source["include_paths"]))
        # Without a key a retry after a lost answer could submit twice; a key of our own makes it safe.
        key = idempotency_key or checked.get("idempotency_token") or f"call-{uuid.uuid4()}"
        answer: Job = self._call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key}).json()
        return answer

    def _body(self, spec: Spec) -> dict[str, Any]:
        return {"spec": dict(spec)} if isinstance(spec, Mapping) else {"spec_yaml": read_text(Path(spec))}

    def _send_code(self, root: Path, include: tuple[str, ...]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "code.tar.gz"
            digest = pack(root, include, archive)
            missing = self._call("POST", "/v1/blobs:missing", json={"digests": [digest]}).json()["missing"]
            if missing:
                self._call("PUT", f"/v1/blobs/{digest}", content=archive.read_bytes())
        return digest

    def get(self, job_id: str) -> Job:
        """The job as it is now."""
        answer: Job = self._get(f"/v1/jobs/{job_id}")
        return answer

    def list(self, *, state: str | None = None, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """Jobs, newest first: {"jobs": [...], "next": cursor or None}."""
        answer: dict[str, Any] = self._get("/v1/jobs", state=state, limit=limit, cursor=cursor)
        return answer

    def wait(self, job_id: str, *, timeout: float | None = None, until: str = "terminal") -> Job:
        """Wait until the job is terminal (or `mirrored` to MLflow); after `timeout` seconds it is returned as it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 30.0 if deadline is None else max(0.0, min(30.0, deadline - time.monotonic()))
            job: Job = self._get(f"/v1/jobs/{job_id}", wait=left, until=until)
            done = job["mirrored"] if until == "mirrored" else job["state"] not in ("queued", "active")
            if done or (deadline is not None and time.monotonic() >= deadline):
                return job

    def cancel(self, job_id: str, reason: str = "") -> Job:
        """Ask for the job's end. It is over once its state is `cancelled`."""
        answer: Job = self._call("POST", f"/v1/jobs/{job_id}:cancel", json={"reason": reason}).json()
        return answer

    def explain(self, job_id: str) -> dict[str, Any]:
        """Why it waits (reasons), or why it failed (problem)."""
        answer: dict[str, Any] = self._get(f"/v1/jobs/{job_id}/explanation")
        return answer

    def timeline(self, job_id: str) -> Rows:
        """The job's story: {seq, at_ms, what, detail} in the order of the log."""
        answer: Rows = self._get(f"/v1/jobs/{job_id}/timeline")["timeline"]
        return answer

    def nodes(self) -> Rows:
        """Every node with its health and what it holds."""
        answer: Rows = self._get("/v1/nodes")["nodes"]
        return answer

    def retest(self, node: str, reason: str = "") -> dict[str, Any]:
        """Ask for a re-test of a node."""
        answer: dict[str, Any] = self._call("POST", f"/v1/nodes/{node}:retest", json={"reason": reason}).json()
        return answer

    def events(self, job_id: str | None = None, *, after: int = 0, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Events of a job, or of everything, after a sequence. With `follow` until the job is over, or for ever."""
        path = f"/v1/jobs/{job_id}/events" if job_id else "/v1/events"
        while follow:
            for name, data in self._sse(path, {}, str(after)):
                event = json.loads(data)
                after = event["seq"]
                yield event
                if name == "stoker.job.finished.v1" and job_id:
                    return
            # The stream ended in order: the gateway stops, or nothing can follow.
            if job_id and self.get(job_id)["state"] not in ("queued", "active"):
                break
            time.sleep(RECONNECT_S)
        more = True
        while more:
            page = self._get(path, after=after)
            yield from page["events"]
            after, more = page["last"], page["more"]

    def logs(
        self, job_id: str, *, follow: bool = False, rank: int | None = None, tail: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Log lines {cursor, attempt, node, rank, stream, number, line}. With `follow` until the job's last line."""
        path = f"/v1/jobs/{job_id}/logs"
        params = {k: v for k, v in {"rank": rank, "tail": tail}.items() if v is not None}
        if not follow:
            response = self._call("GET", path, params=params)
            yield from (json.loads(line) for line in response.text.splitlines())
            return
        last: str | None = None
        while True:
            for name, data in self._sse(path, params | {"follow": 1}, last):
                if name == "end":
                    return
                line = json.loads(data)
                last = line["cursor"] or last
                yield line
            time.sleep(RECONNECT_S)

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


def submit(spec: Spec, *, code_root: Path | None = None, idempotency_key: str | None = None) -> Job:
    """Submit a job to the gateway that the environment or ./stoker-data names; see Client.submit."""
    with Client() as client:
        return client.submit(spec, code_root=code_root, idempotency_key=idempotency_key)


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
