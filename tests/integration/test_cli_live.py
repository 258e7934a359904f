"""`stoker` as a process of its own: jobs watched to their end, streams cut short, pipes kept clean."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from stoker_proto import AttemptProgressed, problem
from tests.builders import joined
from tests.integration.cli import finished, gateway, placed, spec
from tests.unit.client_gateway import TOKEN, Gateway

__all__ = ["gateway", "spec"]
LIMIT_S = 30.0


class Running:
    """A `stoker` process whose stdout is read line by line."""

    def __init__(self, gateway: Gateway, *arguments: str) -> None:
        env = os.environ | {"STOKER_URL": gateway.url, "STOKER_TOKEN": TOKEN, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker.cli", *arguments],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)

    def line(self) -> Any:
        """The next line of stdout, as JSON."""
        return json.loads(self._lines.get(timeout=LIMIT_S))

    def end(self) -> tuple[int, list[str], str]:
        """The exit code, what is left of stdout, and stderr."""
        assert self.process.stderr is not None
        err = self.process.stderr.read()
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code, list(self._lines.queue), err


def test_a_watched_job_is_followed_to_its_end_and_gives_its_exit_code(gateway: Gateway, spec: Path) -> None:
    running = Running(gateway, "submit", str(spec), "--watch", "-o", "json")
    first = running.line()
    assert first["type"] == "stoker.job.submitted.v1"
    job_id = first["data"]["job_id"]
    gateway.tell(placed(job_id))
    assert running.line()["type"] == "stoker.attempt.placed.v1"
    gateway.tell(finished(job_id, "cancelled"))
    assert running.line()["type"] == "stoker.job.finished.v1"
    assert running.end() == (9, [], "")


def test_people_watch_the_story_on_stderr_and_get_the_job_on_stdout(gateway: Gateway, spec: Path) -> None:
    running = Running(gateway, "submit", str(spec), "--watch", "--idempotency-key", "watched")
    other = Running(gateway, "submit", str(spec), "-o", "json", "--idempotency-key", "watched")
    job_id = other.line()["job_id"]
    other.end()
    told = problem("exit_code", "rank 0 ended with code 3")
    gateway.tell(placed(job_id), AttemptProgressed(job_id=job_id, attempt=1, step=7), finished(job_id, "failed", told))
    code, out, err = running.end()
    assert code == 1
    assert f"submitted {job_id}" in err
    assert "failed after 1 attempt(s)" in err
    assert "rank 0 ended with code 3" in "".join(out)


def test_followed_logs_come_as_they_are_written_and_end_with_the_job(gateway: Gateway, spec: Path) -> None:
    submitted = Running(gateway, "submit", str(spec), "-o", "json")
    job_id = submitted.line()["job_id"]
    submitted.end()
    gateway.tell(placed(job_id))
    running = Running(gateway, "logs", job_id, "-f", "-o", "json")
    for text in ("one", "two"):
        gateway.say(job_id, text)
        assert running.line()["line"] == text
    gateway.say(job_id, "last")
    gateway.tell(finished(job_id))
    assert running.line()["line"] == "last"
    assert running.end() == (0, [], "")


def test_a_wait_in_a_pipe_says_nothing_but_the_job(gateway: Gateway, spec: Path) -> None:
    submitted = Running(gateway, "submit", str(spec), "-o", "json")
    job_id = submitted.line()["job_id"]
    submitted.end()
    running = Running(gateway, "wait", job_id, "-o", "json")
    gateway.tell(placed(job_id), finished(job_id))
    assert running.line()["state"] == "succeeded"
    assert running.end() == (0, [], "")


def test_ctrl_c_is_no_failure_of_the_job(gateway: Gateway, spec: Path) -> None:
    running = Running(gateway, "events", "-f", "-o", "json")
    running.line()
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.end()
    assert code == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_the_stream_without_a_traceback(gateway: Gateway, spec: Path) -> None:
    env = os.environ | {"STOKER_URL": gateway.url, "STOKER_TOKEN": TOKEN}
    argv = [sys.executable, "-m", "stoker.cli", "events", "-f", "-o", "json"]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    gateway.tell(joined("node-7"))
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(LIMIT_S) != 0
