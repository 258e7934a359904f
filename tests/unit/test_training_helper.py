"""What training scripts rely on: metrics by line, checkpoints that are whole or not there, resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker import training


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("STOKER_METRICS_FILE", str(tmp_path / "metrics"))
    return tmp_path / "checkpoints"


def write(folder: Path) -> None:
    (folder / "model").write_text("weights")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_each_metric_is_one_line_and_infinities_are_kept(folder: Path, tmp_path: Path) -> None:
    training.log(7, loss=1.5, gap=float("inf"))
    points = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [(p["key"], p["value"], p["step"]) for p in points] == [("loss", 1.5, 7), ("gap", "inf", 7)]
    assert all(p["time_ms"] > 0 for p in points)


def test_outside_of_stoker_nothing_is_logged_and_nothing_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOKER_METRICS_FILE", "STOKER_PARAMETERS", "STOKER_RESUME_FROM"):
        monkeypatch.delenv(name, raising=False)
    training.log(0, loss=1.0)
    assert training.parameters() == {}
    assert training.resume() is None


def test_a_checkpoint_is_complete_once_saved(folder: Path) -> None:
    saved = training.save(12, write)
    assert saved == folder / "step-0000000012"
    assert names(saved) == ["COMPLETE", "model"]


def test_a_write_that_fails_leaves_no_checkpoint(folder: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        training.save(1, fail)
    assert not [n for n in names(folder) if n.startswith("step-")]


def test_only_the_newest_are_kept_and_leftovers_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CHECKPOINT_KEEP", "2")
    (folder / "step-0000000001").mkdir(parents=True)
    (folder / ".step-0000000002.part").mkdir()
    for step in (10, 20, 30):
        training.save(step, write)
    assert names(folder) == ["step-0000000020", "step-0000000030"]


def test_after_going_back_the_checkpoint_just_saved_is_kept_whatever_its_step(folder: Path) -> None:
    for step in (10, 20, 30):
        training.save(step, write)
    training.save(5, write)
    assert names(folder) == ["step-0000000005", "step-0000000020", "step-0000000030"]


def test_saving_a_step_again_replaces_it(folder: Path) -> None:
    training.save(1, write)
    training.save(1, lambda folder: (folder / "other").touch())
    assert names(folder / "step-0000000001") == ["COMPLETE", "other"]


def test_resume_names_step_and_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = training.save(40, write)
    monkeypatch.setenv("STOKER_RESUME_FROM", str(saved))
    assert training.resume() == (40, saved)


def test_parameters_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.json").write_text('{"lr": 0.1}')
    monkeypatch.setenv("STOKER_PARAMETERS", str(tmp_path / "p.json"))
    assert training.parameters() == {"lr": 0.1}


LOOP = """
import os, sys, time
from stoker import training
steps = 0
while not training.should_stop() and steps < float(sys.argv[1]):
    steps += 1
    print("step", flush=True)
    time.sleep(0.01)
if sys.argv[1] != "inf":
    print("evaluating", flush=True)
    time.sleep(0.5)
"""


def looping(tmp_path: Path, steps: str, until: str) -> subprocess.Popen[str]:
    """A training loop that has said this, and was then asked to stop."""
    env = os.environ | {"STOKER_STOP_FILE": str(tmp_path / "stop")}
    process = subprocess.Popen([sys.executable, "-c", LOOP, steps], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != f"{until}\n":
        pass
    process.send_signal(signal.SIGTERM)
    return process


def test_a_loop_that_looks_hears_of_its_stop_and_ends_as_it_likes(tmp_path: Path) -> None:
    with looping(tmp_path, "inf", "step") as process:
        assert process.wait(20) == 0
    assert (tmp_path / "stop").read_text() == "told"


def test_a_job_past_its_last_look_is_let_finish_and_the_launcher_can_tell(tmp_path: Path) -> None:
    with looping(tmp_path, "2", "evaluating") as process:
        assert process.wait(20) == 0
    assert (tmp_path / "stop").read_text() == "heard"


def test_a_helper_process_that_is_ended_does_not_speak_for_the_job(tmp_path: Path) -> None:
    script = """
import multiprocessing, time
from stoker import training
training.should_stop()
fork = multiprocessing.get_context("fork")
up = fork.Event()
helper = fork.Process(target=lambda: (up.set(), time.sleep(60)))
helper.start()
up.wait()
helper.terminate()
helper.join(10)
print(helper.exitcode, training.should_stop())
"""
    env = os.environ | {"STOKER_STOP_FILE": str(tmp_path / "stop")}
    said = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert said.stdout == "-15 False\n"
    assert not (tmp_path / "stop").exists()
