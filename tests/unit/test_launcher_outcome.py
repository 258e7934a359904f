"""How an attempt ended, as far as its launcher can tell."""

from __future__ import annotations

from typing import get_args

import pytest

from stoker_launcher.outcome import STOPPED, classify, within_grace
from stoker_proto import AttemptExited, Outcome, RankExit, StopReason

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


def test_every_reason_to_stop_has_its_outcome() -> None:
    assert set(STOPPED) == set(get_args(StopReason))


TERMED = RankExit(rank=1, code=None, signal=15)
KILLED = RankExit(rank=1, code=None, signal=9)
SAVED = RankExit(rank=0, code=0)
SHELL = RankExit(rank=0, code=1, stderr_tail=("Traceback (most recent call last):", "KeyError: 'loss'"))
ELASTIC = RankExit(
    rank=0, code=1, stderr_tail=("torch.distributed.elastic.SignalException: Process 12 got signal: 15",)
)
INTERRUPTED = RankExit(rank=0, code=130, error_type="KeyboardInterrupt", error="KeyboardInterrupt")
NO_MEMORY = RankExit(rank=0, code=1, error_type="MemoryError", error="MemoryError")


@pytest.mark.parametrize(
    "ranks",
    [(TERMED,), (KILLED,), (SAVED, TERMED), (CASCADE, TERMED), (ELASTIC,), (INTERRUPTED,),
     (RankExit(rank=0, code=143),), (RankExit(rank=0, code=1),), (ABORTED, SAVED)],
)  # fmt: skip
def test_a_rank_that_ends_of_its_stop_was_stopped(ranks: tuple[RankExit, ...]) -> None:
    assert within_grace(ranks, "preempted", set()) == "preempted"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [((RAISED,), "user_error"), ((TERMED, RAISED), "user_error"), ((OOM, TERMED), "oom"), ((SHELL,), "user_error"),
     ((NO_MEMORY,), "oom")],
)  # fmt: skip
@pytest.mark.parametrize("asked", ["preempted", "window_closed", "deadline"])
def test_what_breaks_within_the_grace_for_a_reason_of_its_own_keeps_it(
    ranks: tuple[RankExit, ...], expected: Outcome, asked: StopReason
) -> None:
    assert within_grace(ranks, asked, set()) == expected


@pytest.mark.parametrize("asked", ["cancelled", "timeout", "lost", "peer_failed", "node_quarantined"])
def test_what_breaks_in_a_gang_that_is_not_to_go_on_is_not_looked_at(asked: StopReason) -> None:
    assert within_grace((RAISED,), asked, set()) == STOPPED[asked]


def test_work_that_was_done_before_anybody_looked_is_done() -> None:
    ranks = (SAVED, RankExit(rank=1, code=0))
    assert within_grace(ranks, "preempted", {0, 1}) == "ok"
    assert within_grace(ranks, "preempted", {1}) == "preempted"
    assert within_grace((SAVED, RankExit(rank=1, code=3)), "preempted", {0, 1}) == "preempted"
    assert within_grace(ranks, "peer_failed", {0, 1}) == "infra_comm"


@pytest.mark.parametrize(
    ("outcome", "asked", "failed"),
    [("ok", None, False), ("user_error", None, True), ("infra_node", None, True), ("preempted", "preempted", False),
     ("oom", "preempted", True), ("ok", "preempted", False), ("infra_gpu", "node_quarantined", False)],
)  # fmt: skip
def test_an_exit_says_whether_it_was_a_failure_of_its_own(
    outcome: Outcome, asked: StopReason | None, failed: bool
) -> None:
    exited = AttemptExited(job_id="j", attempt=1, node="n", fence=1, outcome=outcome, asked=asked)
    assert exited.failed is failed
