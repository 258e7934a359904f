"""examples/chargpt under plain processes: it learns, and resuming it changes nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.bundle import files_of
from stoker_proto import JobSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "chargpt"
RANKS = 2
SMALL = {"layers": 1, "width": 32, "heads": 2, "block_size": 32, "batch_size": 4, "checkpoint_seconds": 1000}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def train(
    folder: Path,
    meanwhile: Callable[[list[subprocess.Popen[str]]], None] = lambda ranks: None,
    *,
    resume: Path | None = None,
    **parameters: Any,
) -> dict[int, float]:
    """Train with two ranks as torchrun and the launcher would start them; the loss of each step."""
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps(SMALL | parameters))
    env = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")} | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "STOKER_PARAMETERS": str(folder / "parameters.json"), "STOKER_CHECKPOINT_DIR": str(folder / "checkpoints"),
    }  # fmt: skip
    if resume is not None:
        env["STOKER_RESUME_FROM"] = str(resume)
    ranks = []
    for rank in range(RANKS):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "STOKER_METRICS_FILE": str(folder / f"{rank}.metrics")}
        argv = [sys.executable, str(EXAMPLE / "train.py")]
        ranks.append(
            subprocess.Popen(argv, env=env | mine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    meanwhile(ranks)
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)
    assert not (folder / "1.metrics").exists(), "only rank 0 logs"
    points = [json.loads(line) for line in (folder / "0.metrics").read_text().splitlines()]
    assert {p["key"] for p in points} == {"loss", "tokens_per_second", "lr"}
    return {p["step"]: p["value"] for p in points if p["key"] == "loss"}


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


@pytest.mark.timeout(300)
def test_a_training_resumed_from_a_checkpoint_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", max_steps=12)
    assert list(whole) == list(range(12))
    assert whole[11] < whole[0]

    first = train(tmp_path / "first", max_steps=7)
    (saved,) = checkpoints(tmp_path / "first")
    assert saved.name == "step-0000000007"
    assert (saved / "COMPLETE").exists()
    rest = train(tmp_path / "rest", max_steps=12, resume=saved)
    assert list(rest) == list(range(7, 12))
    assert first | rest == whole


@pytest.mark.timeout(300)
def test_a_training_that_is_asked_to_stop_ends_on_all_ranks_with_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    def ask(ranks: list[subprocess.Popen[str]]) -> None:
        while not (tmp_path / "asked" / "0.metrics").exists():
            time.sleep(0.05)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)

    losses = train(tmp_path / "asked", ask, max_steps=1_000_000)
    (saved,) = checkpoints(tmp_path / "asked")
    assert int(saved.name.removeprefix("step-")) == max(losses) + 1


@pytest.mark.timeout(300)
def test_a_limit_of_time_ends_the_training_with_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    losses = train(tmp_path / "short", max_steps=1_000_000, max_seconds=0.2)
    (saved,) = checkpoints(tmp_path / "short")
    assert int(saved.name.removeprefix("step-")) == max(losses) + 1


def test_the_job_is_a_valid_spec_that_uses_parameters_the_script_knows() -> None:
    spec = JobSpec.model_validate(yaml.safe_load((EXAMPLE / "job.yaml").read_text()))
    assert spec.compute.nodes == 2
    assert spec.entrypoint is not None
    script = (EXAMPLE / spec.entrypoint).read_text()
    for name in spec.parameters:
        assert f'"{name}"' in script


def test_what_travels_with_the_job_is_the_example_alone() -> None:
    assert {p.name for p in files_of(EXAMPLE, ())} == {"README.md", "input.txt", "job.yaml", "model.py", "train.py"}
