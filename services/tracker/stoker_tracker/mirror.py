"""Writes to MLflow, each of them harmless to repeat. The only importer of mlflow.

A run is found by its tag before one is made, over every life-cycle stage. A metric point that is already there is not
stored again, because MLflow's key of a point is all of it. What MLflow refuses for good is told and left out; what it
cannot take now is tried again for as long as it takes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# Short tries: this module does its own waiting, and says so.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException, RestException
from mlflow.tracking import MlflowClient
from requests.exceptions import RequestException

from .mapping import Ending, Measured, NewRun, RunStatus, Update

METRICS_A_BATCH, TAGS_A_BATCH = 1000, 100
log = logging.getLogger(__name__)
T = TypeVar("T")
FINAL_CODES = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}


@dataclass(frozen=True)
class RunRef:
    """Where a job's run lies in MLflow."""

    experiment_id: str
    run_id: str
    url: str


class Mirror:
    """One MLflow server. Calls block; run them in a thread."""

    def __init__(self, url: str, *, pause_s: float = 1.0) -> None:
        self._url = url.rstrip("/")
        self._client = MlflowClient(tracking_uri=self._url)
        self._pause_s = pause_s

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        """The call's answer, however long the server is away. Raises MlflowException for a refusal that is final."""
        pause = self._pause_s
        while True:
            try:
                return call()
            except RestException as error:
                if error.error_code in FINAL_CODES:
                    raise
                trouble: Exception = error
            except MlflowException as error:
                if error.error_code in FINAL_CODES:
                    raise
                trouble = error
            except RequestException as error:
                trouble = error
            log.warning("MLflow at %s: %s failed, trying again: %s", self._url, what, str(trouble)[:200])
            time.sleep(pause)
            pause = min(15.0, pause * 2)

    def ensure_run(self, job_id: str, wanted: NewRun) -> tuple[RunRef, list[str]]:
        """The job's run, found or made, with its parameters and tags; and what was refused."""
        experiment_id = self._experiment(wanted.experiment)
        run_id = self.find_run(experiment_id, job_id)
        if run_id is None:
            tags = dict(wanted.tags)
            made = self._tried(
                "create run",
                lambda: self._client.create_run(
                    experiment_id, start_time=wanted.start_ms, tags=tags, run_name=wanted.name[:250]
                ),
            )
            run_id = str(made.info.run_id)
            self._status(run_id, "SCHEDULED")
        refused = self._params(run_id, wanted.params)
        return self._ref(experiment_id, run_id), refused

    def _ref(self, experiment_id: str, run_id: str) -> RunRef:
        return RunRef(experiment_id, run_id, f"{self._url}/#/experiments/{experiment_id}/runs/{run_id}")

    def _experiment(self, name: str) -> str:
        """The experiment's id; a deleted one of that name is restored, since its name stays taken."""
        found = self._tried("look up experiment", lambda: self._client.get_experiment_by_name(name))
        if found is None:
            try:
                return str(self._tried("create experiment", lambda: self._client.create_experiment(name)))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                return self._experiment(name)
        if found.lifecycle_stage == "deleted":
            self._tried("restore experiment", lambda: self._client.restore_experiment(found.experiment_id))
        return str(found.experiment_id)

    def find_run(self, experiment_id: str, job_id: str) -> str | None:
        """The oldest run with the job's tag, so that two made in a race count as one."""
        found = self._tried(
            "find run",
            lambda: self._client.search_runs(
                [experiment_id],
                f"tags.`stoker.job_id` = '{job_id}'",
                run_view_type=ViewType.ALL,
                order_by=["attributes.start_time ASC"],
                max_results=1,
            ),
        )
        return str(found[0].info.run_id) if found else None

    def _params(self, run_id: str, params: Sequence[tuple[str, str]]) -> list[str]:
        """Log parameters in batches; one that MLflow refuses does not keep the rest out."""
        refused: list[str] = []
        for at in range(0, len(params), TAGS_A_BATCH):
            batch = params[at : at + TAGS_A_BATCH]
            try:
                self._log(run_id, "log params", params=[Param(k, v) for k, v in batch])
            except MlflowException:
                for key, value in batch:
                    try:
                        self._log(run_id, "log param", params=[Param(key, value)])
                    except MlflowException as error:
                        refused.append(f"param {key}: {str(error)[:200]}")
        return refused

    def _log(
        self,
        run_id: str,
        what: str,
        *,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
    ) -> None:
        self._tried(what, lambda: self._client.log_batch(run_id, metrics=metrics, params=params, tags=tags))

    def _status(self, run_id: str, status: RunStatus) -> None:
        self._tried("update status", lambda: self._client.update_run(run_id, status=status))

    def change(self, run_id: str, wanted: Update) -> list[str]:
        """Set tags and status; what was refused."""
        try:
            if wanted.tags:
                self._log(run_id, "set tags", tags=[RunTag(k, v) for k, v in wanted.tags])
            if wanted.status:
                self._status(run_id, wanted.status)
        except MlflowException as error:
            return [f"tags or status: {str(error)[:200]}"]
        return []

    def points(self, run_id: str, points: Sequence[Measured]) -> list[str]:
        """Log metric points; what was refused."""
        refused: list[str] = []
        for at in range(0, len(points), METRICS_A_BATCH):
            batch = [Metric(p.key, p.value, p.time_ms, p.step) for p in points[at : at + METRICS_A_BATCH]]
            try:
                self._log(run_id, "log metrics", metrics=batch)
            except MlflowException as error:
                refused.append(f"{len(batch)} metric points: {str(error)[:200]}")
        return refused

    def artifact(self, run_id: str, file: Path, folder: str) -> None:
        """Store a file; again is the same as once, as it replaces itself."""
        self._tried("store artifact", lambda: self._client.log_artifact(run_id, str(file), folder))

    def end(self, run_id: str, wanted: Ending) -> list[str]:
        """The last metrics and tags, then the terminal status, asserted even when the job's own code set another."""
        refused = self.points(run_id, wanted.metrics) + self.change(run_id, Update(wanted.tags))
        try:
            self._tried(
                "set terminated",
                lambda: self._client.set_terminated(run_id, status=wanted.status, end_time=wanted.end_ms),
            )
        except MlflowException as error:
            refused.append(f"terminal status: {str(error)[:200]}")
        return refused
