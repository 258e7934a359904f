"""A real MLflow server for tests, what it holds as plain values, and a tracker in a process of its own."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from mlflow.entities import ViewType
from mlflow.tracking import MlflowClient


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A child process with its output in a file."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._argv, self._log, self._env = argv, log, os.environ | (env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdout=log, stderr=log, env=self._env, start_new_session=True
            )  # fmt: skip

    def kill9(self) -> None:
        """Kill it and all that it has started, now."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self, seconds: float = 20) -> int:
        """Ask it to end; its exit code."""
        assert self._process
        self._process.terminate()
        code = self._process.wait(seconds)
        self._process = None
        return code

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


class MlflowServer:
    """`mlflow server` on SQLite with its artifacts, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        argv += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
        argv += ["--artifacts-destination", str(folder / "artifacts"), "--serve-artifacts"]
        self.log = folder / "server.log"
        self._process = Process(argv, self.log)

    def start(self) -> None:
        self._process.start()
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self._process.alive, self.log.read_text()[-2000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError("MLflow did not come up")

    def kill9(self) -> None:
        self._process.kill9()


def tracker(nats_url: str, mlflow_url: str, data: Path) -> Process:
    """A tracker process, not yet started, that batches metrics shortly so that kills hit many states."""
    env = {
        "STOKER_NATS_URL": nats_url, "STOKER_MLFLOW_URL": mlflow_url, "STOKER_DATA_DIR": str(data),
        "STOKER_BATCH_SECONDS": "0.1", "STOKER_READY_FILE": str(data / "ready"),
    }  # fmt: skip
    data.mkdir(parents=True, exist_ok=True)
    return Process([sys.executable, "-m", "stoker_tracker"], data / "tracker.log", env)


def content(url: str, experiment: str) -> dict[str, Any]:
    """Everything that MLflow holds of an experiment, by the job ids of its runs; ids of MLflow's own left out."""
    client = MlflowClient(tracking_uri=url)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return {}
    runs = client.search_runs([found.experiment_id], run_view_type=ViewType.ALL, max_results=1000)
    held = {run.data.tags["stoker.job_id"]: _run(client, run) for run in runs}
    assert len(held) == len(runs), "no job has two runs"
    return held


def _run(client: MlflowClient, run: Any) -> dict[str, Any]:
    run_id = run.info.run_id
    metrics = {
        key: sorted(
            (p.step, p.timestamp, str(p.value) if math.isnan(p.value) else p.value)
            for p in client.get_metric_history(run_id, key)
        )
        for key in run.data.metrics
    }
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "stage": run.info.lifecycle_stage,
        "start": run.info.start_time,
        "end": run.info.end_time,
        "params": dict(run.data.params),
        "tags": {k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")},
        "metrics": metrics,
        "artifacts": {path: _text(client, run_id, path) for path in _files(client, run_id, "")},
    }


def _files(client: MlflowClient, run_id: str, folder: str) -> list[str]:
    found: list[str] = []
    for info in client.list_artifacts(run_id, folder or None):
        found += _files(client, run_id, info.path) if info.is_dir else [info.path]
    return sorted(found)


def _text(client: MlflowClient, run_id: str, path: str) -> str:
    return Path(client.download_artifacts(run_id, path)).read_text()
