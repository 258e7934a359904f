"""The scheduler folds every golden log: to the same state in any process, and to the end that the log tells of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_proto import JobFinished, Recorded, from_line
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.evolve import evolve
from stoker_scheduler.invariants import violations
from stoker_scheduler.state import State, state_hash

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.jsonl"))
HASHER = """
import sys
from stoker_proto import from_line
from stoker_scheduler.evolve import evolve
from stoker_scheduler.state import State, state_hash
state = State()
for line in open(sys.argv[1]):
    state = evolve(state, from_line(line))
print(state_hash(state))
"""


def read(path: Path) -> list[Recorded]:
    return [from_line(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_the_fold_ends_where_the_log_says(path: Path) -> None:
    records = read(path)
    state = State()
    for recorded in records:
        state = evolve(state, recorded)
    finished = {r.event.job_id: r.event for r in records if isinstance(r.event, JobFinished)}
    assert finished, "a golden log tells of at least one job's end"
    for job_id, event in finished.items():
        assert job_id not in state.jobs
        assert state.over[job_id] == (event.state, event.outcome)
    assert not any(state.owner.values()), "no GPU is left allocated"
    assert violations(state) == []
    assert state.voided == 0


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_deciding_at_the_logs_end_decides_nothing(path: Path) -> None:
    scheduler = Scheduler(Timing())
    records = read(path)
    for recorded in records:
        scheduler.evolve(recorded)
    assert scheduler.decide(records[-1].at_ms) == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_two_processes_with_different_hash_seeds_agree(path: Path) -> None:
    hashes = {
        subprocess.run(
            [sys.executable, "-c", HASHER, str(path)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
    state = State()
    for recorded in read(path):
        state = evolve(state, recorded)
    assert hashes == {state_hash(state) + "\n"}
