"""How an attempt ended, as far as its launcher can tell."""

from __future__ import annotations

import pytest

from stoker_launcher.outcome import classify
from stoker_proto import Outcome, RankExit, StopReason

RAISED = RankExit(rank=0, code=1, error_type="ValueError", error="ValueError: bad")
OOM = RankExit(rank=0, code=1, error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
ABORTED = RankExit(rank=1, code=None, signal=6, stderr_tail=("CUDA error: the GPU is lost",))
CASCADE = RankExit(rank=2, code=1, stderr_tail=("RuntimeError: Connection closed by peer [10.0.0.2]:1234",))
FINE = RankExit(rank=3, code=0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((FINE, FINE), "ok"),
        ((RAISED,), "user_error"),
        ((FINE, RAISED), "user_error"),
        ((OOM,), "oom"),
        ((ABORTED,), "infra_gpu"),
        ((CASCADE,), "infra_comm"),
        ((CASCADE, ABORTED), "infra_gpu"),
        ((CASCADE, RAISED), "user_error"),
        ((RankExit(rank=0, code=7),), "user_error"),
    ],
)
def test_the_first_rank_that_failed_by_itself_decides(ranks: tuple[RankExit, ...], expected: Outcome) -> None:
    assert classify(ranks, None) == expected


@pytest.mark.parametrize(
    ("asked", "expected"), [("cancelled", "cancelled"), ("preempted", "preempted"), ("timeout", "timeout")]
)
def test_what_was_asked_for_is_the_outcome(asked: StopReason, expected: Outcome) -> None:
    assert classify((RankExit(rank=0, code=None, signal=15),), asked) == expected
