"""Writes to MLflow, each of them harmless to repeat. The only importer of mlflow.

A run is found by its tag before one is made, over every life-cycle stage. A metric point that is already there is not
stored again, because MLflow's key of a point is all of it. What MLflow refuses for good is told and left out, alone;
what it cannot take now is tried again for as long as it takes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

# One try a call: this module does its own waiting, and a blind second try could make a second run.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException, RestException
from mlflow.tracking import MlflowClient
from requests.exceptions import HTTPError, RequestException

from .mapping import Ending, Measured, NewRun, RunStatus, Update

METRICS_A_BATCH, TAGS_A_BATCH = 1000, 100
TRIES, LONGEST_PAUSE_S = 6, 15.0
FINAL_CODES = {
    "INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE",
    "MALFORMED_REQUEST",
}  # fmt: skip
FINAL_HTTP = {400, 404, 405, 409, 411, 413, 414, 422}
log = logging.getLogger(__name__)
T = TypeVar("T")


class Refused(Exception):
    """MLflow will never take this."""


class Closed(Exception):
    """The process ends while MLflow is away."""


@dataclass(frozen=True)
class RunRef:
    """Where a job's run lies in MLflow."""

    experiment_id: str
    run_id: str
    url: str


def _final(error: MlflowException | RequestException, tries: int) -> bool:
    """Whether to give up: it was refused, or the server itself fails on it each time. A server away is waited for."""
    if isinstance(error, HTTPError) and error.response is not None:
        status = error.response.status_code
        return status in FINAL_HTTP or (status == 500 and tries >= TRIES)
    if isinstance(error, MlflowException):
        if error.error_code in FINAL_CODES:
            return True
        return isinstance(error, RestException) and error.error_code == "INTERNAL_ERROR" and tries >= TRIES
    return False


class Mirror:
    """One MLflow server. Calls block; run them in a thread."""

    def __init__(self, url: str, *, pause_s: float = 1.0) -> None:
        self._url = url.rstrip("/")
        self._client = MlflowClient(tracking_uri=self._url)
        self._pause_s = pause_s
        self._closed = threading.Event()

    def close(self) -> None:
        """Wake whoever waits for the server, with Closed."""
        self._closed.set()

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        """The call's answer, however long the server is away. Raises Refused, or Closed."""
        pause, tries = self._pause_s, 0
        while True:
            try:
                return call()
            except (MlflowException, RequestException) as error:
                tries += 1
                if _final(error, tries):
                    raise Refused(str(error)[:200]) from error
                log.warning("MLflow at %s: %s failed, trying again: %s", self._url, what, str(error)[:200])
            if self._closed.wait(pause):
                raise Closed(what)
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def ensure_run(self, job_id: str, wanted: NewRun) -> tuple[RunRef, list[str]]:
        """The job's run, found or made, with its parameters and tags; and what was refused. Raises Refused."""
        experiment_id = self._experiment(wanted.experiment)

        def found_or_made() -> str:
            """Looks before each try: the answer to the last one may have been lost, not the run."""
            found = self.find_run(experiment_id, job_id)
            if found is not None:
                return found
            made = self._client.create_run(
                experiment_id, start_time=wanted.start_ms, tags=dict(wanted.tags), run_name=wanted.name[:250]
            )
            return str(made.info.run_id)

        run_id = self._tried("find or create run", found_or_made)
        refused = self._each(
            run_id, "params", wanted.params, TAGS_A_BATCH,
            lambda some: self._client.log_batch(run_id, params=[Param(k, v) for k, v in some]),
        )  # fmt: skip
        url = f"{self._url}/#/experiments/{experiment_id}/runs/{run_id}"
        return RunRef(experiment_id, run_id, url), refused

    def _experiment(self, name: str) -> str:
        """The experiment's id; a deleted one of that name is restored, since its name stays taken."""

        def found_or_made() -> str:
            found = self._client.get_experiment_by_name(name)
            if found is None:
                return str(self._client.create_experiment(name))
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

        try:
            return self._tried("find or create experiment", found_or_made)
        except Refused:  # somebody else was quicker
            return self._tried("find or create experiment", found_or_made)

    def find_run(self, experiment_id: str, job_id: str) -> str | None:
        """The oldest run with the job's tag, so that two made in a race count as one."""
        found = self._client.search_runs(
            [experiment_id],
            f"tags.`stoker.job_id` = '{job_id}'",
            run_view_type=ViewType.ALL,
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        return str(found[0].info.run_id) if found else None

    def _each(
        self, run_id: str, what: str, items: Sequence[T], size: int, send: Callable[[Sequence[T]], object]
    ) -> list[str]:
        """Send all items in batches. One that MLflow refuses is found by halving and does not keep the rest out."""
        refused: list[str] = []
        waiting = [items[at : at + size] for at in range(0, len(items), size)][::-1]
        while waiting:
            batch = waiting.pop()
            try:
                self._tried(f"log {what}", partial(send, batch))
            except Refused as error:
                if self._revived(run_id):
                    waiting.append(batch)
                elif len(batch) > 1 and self._active(run_id):
                    half = len(batch) // 2
                    waiting += [batch[half:], batch[:half]]
                else:
                    refused.append(f"{what}: {len(batch)} from {str(batch[0])[:80]}: {error}")
        return refused

    def _active(self, run_id: str) -> bool:
        try:
            return bool(
                self._tried("look at run", lambda: self._client.get_run(run_id)).info.lifecycle_stage == "active"
            )
        except Refused:
            return False

    def _revived(self, run_id: str) -> bool:
        """Restore the run's experiment if that was deleted. A run that was deleted by itself stays so."""

        def restored() -> bool:
            experiment_id = self._client.get_run(run_id).info.experiment_id
            if self._client.get_experiment(experiment_id).lifecycle_stage == "active":
                return False
            self._client.restore_experiment(experiment_id)
            return True

        try:
            return self._tried("restore experiment", restored)
        except Refused:
            return False

    def change(self, run_id: str, wanted: Update) -> list[str]:
        """Set tags and status; what was refused."""
        refused = self._each(
            run_id, "tags", wanted.tags, TAGS_A_BATCH,
            lambda some: self._client.log_batch(run_id, tags=[RunTag(k, v) for k, v in some]),
        )  # fmt: skip
        return refused + (self._status(run_id, wanted.status, None) if wanted.status else [])

    def _status(self, run_id: str, status: RunStatus, end_ms: int | None) -> list[str]:
        def send(_: Sequence[str]) -> None:
            if end_ms is None:
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status=status, end_time=end_ms)

        return self._each(run_id, "status", [status], 1, send)

    def points(self, run_id: str, points: Sequence[Measured]) -> list[str]:
        """Log metric points; what was refused."""

        def send(some: Sequence[Measured]) -> None:
            self._client.log_batch(run_id, metrics=[Metric(p.key, p.value, p.time_ms, p.step) for p in some])

        return self._each(run_id, "metrics", points, METRICS_A_BATCH, send)

    def artifact(self, run_id: str, file: Path, folder: str) -> list[str]:
        """Store a file, again is the same as once; what was refused."""
        return self._each(
            run_id, "artifact", [file.name], 1, lambda _: self._client.log_artifact(run_id, str(file), folder)
        )

    def end(self, run_id: str, wanted: Ending) -> list[str]:
        """The last metrics and tags, then the terminal status, asserted even when the job's own code set another."""
        refused = self.points(run_id, wanted.metrics) + self.change(run_id, Update(wanted.tags))
        return refused + self._status(run_id, wanted.status, wanted.end_ms)
