"""The Python client: every call of the API, retried where that is safe, failing with a Problem."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from stoker_proto import Problem, ProblemError, problem

from .bundle import pack
from .config import find_server

RETRY_S = 30.0
Job = dict[str, Any]
Rows = list[dict[str, Any]]


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
        self._retry_s = retry_seconds
        headers = {"Authorization": f"Bearer {token or ''}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(70, connect=5))
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
        pause = 0.1
        while True:
            try:
                response = self._http.request(method, path, **more)
                failed = None if response.is_success else problem_of(response)
            except httpx.TransportError as error:
                failed = _unreachable(self.url, error)
            if failed is None:
                return response
            if not failed.retryable or time.monotonic() + pause > deadline:
                raise ProblemError(failed)
            time.sleep(failed.retry_after_s or pause)
            pause = min(2.0, pause * 2)

    def _get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params={k: v for k, v in params.items() if v is not None}).json()

    def validate(self, spec: Path | Mapping[str, Any]) -> dict[str, Any]:
        """The spec with its defaults, or a Problem that names every mistake. Nothing is created."""
        body = self._body(spec)
        answer: dict[str, Any] = self._call("POST", "/v1/jobs:validate", json=body).json()
        return answer

    def submit(
        self, spec: Path | Mapping[str, Any], *, code_root: Path | None = None, idempotency_key: str | None = None
    ) -> Job:
        """Submit a job: validated first, then its code is sent, then it is accepted.

        Args:
            spec: a YAML file, or the spec as a mapping.
            code_root: what code_source.root_path is relative to; by default the folder of the YAML file.
            idempotency_key: the same key and spec give the same job; by default a key of this call alone.
        """
        body = self._body(spec)
        checked = self._call("POST", "/v1/jobs:validate", json=body).json()["spec"]
        source = checked.get("code_source")
        if source is not None:
            base = code_root or (spec.resolve().parent if isinstance(spec, Path) else Path.cwd())
            body["code"] = self._send_code(base / source["root_path"], tuple(source["include_paths"]))
        # Without a key a retry after a lost answer could submit twice; a key of our own makes it safe.
        key = idempotency_key or checked.get("idempotency_token") or f"call-{uuid.uuid4()}"
        answer: Job = self._call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key}).json()
        return answer

    def _body(self, spec: Path | Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(spec, Path):
            return {"spec": dict(spec)}
        try:
            return {"spec_yaml": spec.read_text()}
        except OSError as error:
            raise ProblemError(problem("invalid_request", f"{spec} cannot be read: {error.strerror}")) from error

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
        if not follow:
            yield from self._get(path, after=after)["events"]
            return
        for name, data in self._sse(path, {}, str(after)):
            event = json.loads(data)
            yield event
            if name == "stoker.job.finished.v1" and job_id:
                return

    def logs(
        self, job_id: str, *, follow: bool = False, rank: int | None = None, tail: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Log lines {cursor, attempt, node, rank, stream, number, line}. With `follow` until the job's last line."""
        params = {k: v for k, v in {"rank": rank, "tail": tail}.items() if v is not None}
        if not follow:
            response = self._call("GET", f"/v1/jobs/{job_id}/logs", params=params)
            yield from (json.loads(line) for line in response.text.splitlines())
            return
        for name, data in self._sse(f"/v1/jobs/{job_id}/logs", params | {"follow": 1}, None):
            if name == "end":
                return
            yield json.loads(data)

    def _sse(self, path: str, params: dict[str, Any], last: str | None) -> Iterator[tuple[str, str]]:
        """Server-sent events as (event, data), over any number of lost connections, each told what was seen."""
        deadline = time.monotonic() + self._retry_s
        while True:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
            try:
                timeout = httpx.Timeout(10, read=45)
                with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
                    if not response.is_success:
                        response.read()
                        failed = problem_of(response)
                        if not failed.retryable or time.monotonic() > deadline:
                            raise ProblemError(failed)
                        raise httpx.ReadError(failed.detail)
                    for id, name, data in parse_sse(response.iter_lines()):
                        deadline = time.monotonic() + self._retry_s
                        last = id or last
                        yield name, data
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise ProblemError(_unreachable(self.url, error)) from error
                time.sleep(0.2)


def parse_sse(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(id, event, data) of each message; comments are heartbeats and skipped."""
    id, name, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield id, name, "\n".join(data)
            id, name, data = "", "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            id = value
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


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


def override(spec: Path, changes: list[str]) -> dict[str, Any]:
    """A spec file with `a.b=value` changes applied; values are YAML. Raises ProblemError for a malformed change."""
    body = yaml.safe_load(spec.read_text())
    for change in changes:
        path, separator, value = change.partition("=")
        if not separator or not path:
            raise ProblemError(problem("invalid_request", f"--override {change!r} is not of the form field.path=value"))
        target = body
        *parents, leaf = path.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = yaml.safe_load(value)
    return dict(body)
