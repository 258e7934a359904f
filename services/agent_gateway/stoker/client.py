"""The Python client: every call of the API, retried where that is safe, failing with a Problem."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker_proto import ProblemError

from .bundle import pack
from .overrides import read_text
from .wire import RECONNECT_S, Wire

Job = dict[str, Any]
Rows = list[dict[str, Any]]
Spec = Path | str | Mapping[str, Any]
EDITS = 5


class Client(Wire):
    """Speaks to one gateway.

    Args:
        url: the gateway's address; without it STOKER_URL, or the local system in ./stoker-data.
        token: the bearer token.
        retry_seconds: how long calls are retried while the gateway cannot be reached. Retries of a submission carry the
            same idempotency key, so that they cannot submit twice.

    Every call raises stoker_proto.ProblemError with the server's Problem.
    """

    def validate(self, spec: Spec) -> dict[str, Any]:
        """The spec with its defaults, or a Problem that names every mistake. Nothing is created."""
        body = self._body(spec)
        answer: dict[str, Any] = self._call("POST", "/v1/jobs:validate", json=body).json()
        return answer

    def plan(self, spec: Spec) -> dict[str, Any]:
        """What would become of the job, were it submitted now: {spec, spec_hash, plan}. Nothing is created."""
        answer: dict[str, Any] = self._call("POST", "/v1/jobs:plan", json=self._body(spec)).json()
        return answer

    def submit(self, spec: Spec, *, code_root: Path | None = None, idempotency_key: str | None = None) -> Job:
        """Submit a job: validated first, then its code is sent, then it is accepted. An array gives {array_id, jobs}.

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

    def list(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, array: str | None = None
    ) -> dict[str, Any]:
        """Jobs, newest first, or those of one array: {"jobs": [...], "next": cursor or None}."""
        answer: dict[str, Any] = self._get("/v1/jobs", state=state, limit=limit, cursor=cursor, array=array)
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
        """Ask for the job's end. It is over once its state is `cancelled`. An array's id asks for all of its jobs."""
        return self._ask(job_id, "cancel", reason=reason)

    def hold(self, job_id: str, reason: str = "") -> Job:
        """Let the job, or all jobs of an array, start no new attempt until it is released."""
        return self._ask(job_id, "hold", reason=reason)

    def release(self, job_id: str, reason: str = "") -> Job:
        """Let a held job start again."""
        return self._ask(job_id, "release", reason=reason)

    def set_priority(self, job_id: str, priority: int) -> Job:
        """Give the job another place inside its queue and class; a higher number goes first."""
        return self._ask(job_id, "priority", priority=priority)

    def _ask(self, job_id: str, verb: str, **body: Any) -> Job:
        answer: Job = self._call("POST", f"/v1/jobs/{job_id}:{verb}", json=body).json()
        return answer

    def explain(self, job_id: str) -> dict[str, Any]:
        """Why it waits (reasons, the binding one first), or why it failed (problem)."""
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

    def queues(self) -> dict[str, Any]:
        """Every queue with its share, what it holds and what waits in it: {queues, gpus, gpus_free, ...}."""
        answer: dict[str, Any] = self._get("/v1/queues")
        return answer

    def cluster(self) -> dict[str, Any]:
        """The configuration in force: {version, cluster}."""
        answer: dict[str, Any] = self._get("/v1/cluster")
        return answer

    def cluster_diff(self, cluster: Spec) -> dict[str, Any]:
        """What a configuration (a YAML file or a mapping) would change: {version, diff}. Nothing is changed."""
        answer: dict[str, Any] = self._call("POST", "/v1/cluster:diff", json=_configuration(cluster)).json()
        return answer

    def configure(self, cluster: Spec, *, version: int | None = None, reason: str = "") -> dict[str, Any]:
        """Put a configuration in force, whole: {version, cluster, changed, diff}.

        Args:
            cluster: the path of a YAML file, or the configuration as a mapping.
            version: what it was made from; when the cluster is at another one by now, a cluster_conflict is raised.
            reason: kept in the log.
        """
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        body = _configuration(cluster) | {"reason": reason}
        answer: dict[str, Any] = self._call("PUT", "/v1/cluster", json=body, headers=headers).json()
        return answer

    def edit_cluster(self, change: Callable[[dict[str, Any]], None], reason: str = "") -> dict[str, Any]:
        """Read the configuration, let `change` change it, put it back; again when somebody else came between."""
        tries = 0
        while True:
            present, tries = self.cluster(), tries + 1
            change(present["cluster"])
            try:
                told: dict[str, Any] = self.configure(present["cluster"], version=present["version"], reason=reason)
                return told
            except ProblemError as error:
                if error.problem.code != "cluster_conflict" or tries == EDITS:
                    raise

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


def _configuration(cluster: Spec) -> dict[str, Any]:
    if isinstance(cluster, Mapping):
        return {"cluster": dict(cluster)}
    return {"cluster_yaml": read_text(Path(cluster))}


def submit(spec: Spec, *, code_root: Path | None = None, idempotency_key: str | None = None) -> Job:
    """Submit a job to the gateway that the environment or ./stoker-data names; see Client.submit."""
    with Client() as client:
        return client.submit(spec, code_root=code_root, idempotency_key=idempotency_key)
