"""`stoker up` and `stoker demo` as a user runs them: everything starts, everything ends, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker import Client
from stoker_local.layout import read_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STOKER = [sys.executable, "-m", "stoker.cli"]
ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return value


def start(data: Path) -> subprocess.Popen[bytes]:
    argv = [*STOKER, "up", "--nodes", "1", "--gpus", "2", "--data", str(data)]
    with (data.parent / "up.log").open("ab") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    until(lambda: (data / "stoker.json").exists() or process.poll() is not None, 120)
    assert process.poll() is None, (data.parent / "up.log").read_text()
    return process


def family(data: Path) -> list[str]:
    """Command lines of all living processes that belong to this data folder."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline()) + " ".join(process.environ().values())
            if str(data) in text and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(f"{process.pid} {process.status()}: {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def gone(data: Path) -> None:
    """Wait until nothing of the system is left; who is left is said."""
    deadline = time.monotonic() + 30
    while left := family(data):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def submit_sleeper(data: Path) -> str:
    card = read_card(data / "stoker.json")
    spec = {
        "experiment_name": "sleeper",
        "compute": {"accelerator_type": "GPU_1xSIM", "num_accelerators": 1},
        "command": "echo up; sleep 600",
    }
    with Client(card.url, card.token) as client:
        job_id = str(client.submit(spec)["job_id"])
        assert next(client.logs(job_id, follow=True))["line"] == "up"
    return job_id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_supervisor_and_the_next_one_goes_on(tmp_path: Path, number: int) -> None:
    data = tmp_path / "data"
    process = start(data)
    job_id = submit_sleeper(data)
    assert len(family(data)) > 6
    process.send_signal(number)
    process.wait(60)
    gone(data)
    if number == signal.SIGKILL:
        (data / "stoker.json").unlink()
    process = start(data)
    try:
        card = read_card(data / "stoker.json")
        with Client(card.url, card.token) as client:
            # The node's new boot epoch proves that the first attempt is gone; the job is tried again.
            job = until(lambda: (j := client.get(job_id))["state"] == "active" and len(j["attempts"]) == 2 and j)
            assert job["attempts"][0]["outcome"] == "lost"
            client.cancel(job_id)
            assert client.wait(job_id, timeout=60)["state"] == "cancelled"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    gone(data)


def test_a_second_system_on_the_same_folder_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    process = start(data)
    try:
        argv = [*STOKER, "up", "--nodes", "1", "--gpus", "2", "--data", str(data)]
        second = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert "already runs in" in second.stderr
        card = read_card(data / "stoker.json")
        with Client(card.url, card.token) as client:
            until(lambda: [n["verdict"] for n in client.nodes()] == ["ready"])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_a_bad_scenario_is_refused_before_anything_starts(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("faults:\n  - {kind: xid, code: 79, node: last, after_seconds: 3}\n")
    argv = [*STOKER, "up", "--data", str(tmp_path / "data"), "--scenario", str(scenario)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "node: last needs after_checkpoints" in done.stderr
    assert not (tmp_path / "data").exists()


def test_ctrl_c_while_it_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    data = tmp_path / "data"
    process = subprocess.Popen([*STOKER, "up", "--data", str(data)], stderr=subprocess.DEVNULL)
    until(lambda: len(family(data)) > 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    gone(data)


def test_up_for_programs_says_where_it_is_as_one_document(tmp_path: Path) -> None:
    data = tmp_path / "data"
    argv = [*STOKER, "up", "--nodes", "1", "--gpus", "1", "--data", str(data), "-o", "json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        card = json.loads(process.stdout.readline())
        with Client(card["url"], card["token"]) as client:
            until(lambda: [(n["node"], n["verdict"]) for n in client.nodes()] == [("node-1", "ready")])
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b""
    assert process.wait(60) == 0


def test_the_demo_tells_its_whole_story(tmp_path: Path) -> None:
    argv = [*STOKER, "demo", "--data", str(tmp_path / "data"), "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    story = json.loads(done.stdout)
    titles = [chapter["title"] for chapter in story["chapters"]]
    told = ["submitted", "placed", "preflight", "started", "first step", "checkpoint", "fault", "quarantined"]
    blamed = ["blamed"] if "blamed" in titles else []  # not when the quarantine stops the gang first
    assert titles == [*told, *blamed, "requeued", "placed again", "resumed", "finished"]
    assert story["missing"] == []
    assert story["loss"]["gpu_seconds"] > 0
    assert story["mlflow_url"].startswith("http://127.0.0.1:")
    assert json.loads((tmp_path / "data" / "tracker" / "checkpoint.json").read_text())["seq"] > 0
    gone(tmp_path / "data")
