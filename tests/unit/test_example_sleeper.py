"""examples/sleeper as a plain process: it gives way with a checkpoint, and goes on from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from stoker_proto import JobSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "sleeper"


def start(folder: Path, *, resume: Path | None = None, **parameters: Any) -> subprocess.Popen[str]:
    (folder / "parameters.json").write_text(json.dumps({"step_seconds": 0.01} | parameters))
    env = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")} | {
        "STOKER_PARAMETERS": str(folder / "parameters.json"), "STOKER_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "STOKER_METRICS_FILE": str(folder / "metrics"),
    }  # fmt: skip
    if resume is not None:
        env["STOKER_RESUME_FROM"] = str(resume)
    argv = [sys.executable, str(EXAMPLE / "train.py")]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


def test_it_gives_way_with_a_checkpoint_and_goes_on_from_there(tmp_path: Path) -> None:
    with start(tmp_path, max_steps=100_000, checkpoint_steps=100_000) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "starting at step 0\n"
        while not (tmp_path / "metrics").exists():
            time.sleep(0.01)
        first.send_signal(signal.SIGTERM)
        said = first.stdout.read()
    (saved,) = checkpoints(tmp_path)
    step = int(saved.removeprefix("step-"))
    assert (first.returncode, said) == (0, f"giving way after step {step}\n")
    whole = step + 5
    with start(tmp_path, resume=tmp_path / "checkpoints" / saved, max_steps=whole) as second:
        assert second.stdout is not None
        assert second.stdout.read() == f"starting at step {step}\ndone after {whole} steps\n"
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics").read_text().splitlines()]
    assert steps == list(range(whole))


def test_it_saves_every_so_many_steps(tmp_path: Path) -> None:
    with start(tmp_path, max_steps=5, checkpoint_steps=2) as process:
        assert process.wait(30) == 0
    assert checkpoints(tmp_path) == [f"step-{n:010d}" for n in (2, 4, 5)]


def test_the_job_is_a_valid_spec_that_gives_way_to_others() -> None:
    spec = JobSpec.model_validate(yaml.safe_load((EXAMPLE / "job.yaml").read_text()))
    assert spec.compute.priority_class == "BEST_EFFORT"
    script = (EXAMPLE / str(spec.entrypoint)).read_text()
    assert all(f'"{name}"' in script for name in spec.parameters)
