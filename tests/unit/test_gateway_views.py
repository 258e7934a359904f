"""The read model is a fold of the log: however it was cut, and however often it was thrown away, it says the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Position
from stoker_chassis.memory import MemoryLog
from stoker_gateway.projector import project
from stoker_gateway.store import Views, open_engine
from stoker_gateway.views import JobView
from stoker_proto import (
    Allocation,
    AttemptPlaced,
    AttemptPrepared,
    AttemptProgressed,
    CancelRequested,
    CheckpointSaved,
    Event,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobSpec,
    JobSubmitted,
    MirrorCompleted,
    NodeQuarantined,
    NodeUnknown,
    PendingReasonChanged,
    PreflightPassed,
    PreflightStarted,
    Reason,
    Recorded,
    RunMirrored,
    problem,
)
from tests.builders import ListLog, exited, joined, ready, released, sealed, started, submitted

NODES = ("n1", "n2", "n3")


def placed(job_id: str, attempt: int, *nodes: str) -> AttemptPlaced:
    held = tuple(
        Allocation(node=n, boot_epoch="b1", gpus=(f"{n}-gpu-0",), node_rank=rank) for rank, n in enumerate(nodes)
    )
    return AttemptPlaced(job_id=job_id, attempt=attempt, fence=1, allocations=held, preflight="required")


def finished(job_id: str, attempts: int, state: Any = "succeeded", outcome: Any = "ok") -> JobFinished:
    made = None if state == "succeeded" else problem("exit_code", "exit 1")
    return JobFinished(job_id=job_id, state=state, outcome=outcome, attempts=attempts, gpu_ms=5, problem=made)


def folded(*events: Event) -> Views:
    log, views = ListLog(), Views(open_engine(None))
    views.fold([log.append(e) for e in events])
    return views


def job_after(*events: Event) -> JobView:
    view = folded(submitted("j"), *events).job("j")
    assert view is not None
    return view


def test_a_job_is_queued_active_queued_again_and_over() -> None:
    reasons = (Reason(code="no_room", message="no room"),)
    waiting = job_after(PendingReasonChanged(job_id="j", reasons=reasons))
    assert (waiting.state, waiting.reasons) == ("queued", reasons)
    first = [PendingReasonChanged(job_id="j", reasons=reasons), placed("j", 1, "n1")]
    assert (job_after(*first).state, job_after(*first).reasons) == ("active", ())
    lost = [*first, started("j", 1, "n1", 1), JobRequeued(job_id="j", attempt=1, outcome="infra_gpu", cause="XID 79")]
    again = job_after(*lost)
    assert (again.state, again.attempts[0].outcome, again.attempts[0].cause) == ("queued", "infra_gpu", "XID 79")
    done = job_after(*lost, placed("j", 2, "n2"), CheckpointSaved(job_id="j", attempt=2, step=9, path="p", bytes=1),
                     finished("j", 2))  # fmt: skip
    assert (done.state, done.outcome, done.step, done.gpu_ms) == ("succeeded", "ok", 9, 5)
    assert [a.outcome for a in done.attempts] == ["infra_gpu", "ok"]


def test_a_cancelled_job_says_so_until_it_is_over() -> None:
    asked = [placed("j", 1, "n1"), CancelRequested(job_id="j")]
    assert (job_after(*asked).state, job_after(*asked).cancelling) == ("active", True)
    done = job_after(*asked, finished("j", 1, "cancelled", "cancelled"), CancelRequested(job_id="j"))
    assert (done.state, done.cancelling) == ("cancelled", False)


def test_cancelling_while_it_waits_again_leaves_the_last_attempt_its_own_outcome() -> None:
    lost = JobRequeued(job_id="j", attempt=1, outcome="infra_gpu", cause="XID 79")
    done = job_after(placed("j", 1, "n1"), lost, finished("j", 1, "cancelled", "cancelled"))
    assert (done.outcome, done.attempts[0].outcome) == ("cancelled", "infra_gpu")


def test_a_final_job_never_changes_its_state() -> None:
    late = [
        placed("j", 2, "n1"),
        JobRequeued(job_id="j", attempt=1, outcome="lost", cause=""),
        finished("j", 9, "failed"),
    ]
    done = job_after(placed("j", 1, "n1"), finished("j", 1), *late)
    assert (done.state, len(done.attempts), done.gpu_ms) == ("succeeded", 1, 5)


def test_an_attempt_only_moves_forward_however_its_nodes_report() -> None:
    view = job_after(placed("j", 1, "n1", "n2"), started("j", 1, "n1", 1),
                     AttemptPrepared(job_id="j", attempt=1, node="n2", fence=1))  # fmt: skip
    assert view.attempts[0].state == "running"


def test_an_attempt_is_over_when_all_its_nodes_are() -> None:
    events: list[Event] = [placed("j", 1, "n1", "n2"), started("j", 1, "n1", 1)]
    states = []
    for event in (
        exited("j", 1, "n1", 1),
        released("j", 1, "n1", 1),
        exited("j", 1, "n2", 1),
        released("j", 1, "n2", 1),
    ):
        events.append(event)
        states.append(job_after(*events).attempts[0].state)
    assert states == ["running", "running", "exited", "released"]


def test_mirroring_and_blame_show() -> None:
    blame = JobFailureAttributed(
        job_id="j", attempt=1, outcome="user_error", blame="user", confidence="established", retry=False,
        problem=problem("python_exception", "ValueError: bad"),
    )  # fmt: skip
    view = job_after(
        RunMirrored(job_id="j", experiment_id="1", run_id="r", url="http://mlflow/r"), placed("j", 1, "n1"), blame,
        finished("j", 1, "failed", "user_error"), MirrorCompleted(job_id="j", run_id="r", points=3),
    )  # fmt: skip
    assert (view.mlflow_run_id, view.mlflow_url, view.mirrored) == ("r", "http://mlflow/r", True)
    assert (view.attempts[0].cause, view.problem and view.problem.code) == ("ValueError: bad", "exit_code")


def test_a_node_shows_its_verdict_and_what_it_holds() -> None:
    bad = NodeQuarantined(node="n2", boot_epoch="b1", rule="xid", reason="XID 79")
    old = NodeUnknown(node="n1", boot_epoch="b0", rule="silence", reason="of an earlier boot")
    views = folded(joined("n1"), ready("n1"), joined("n2"), submitted("j"), placed("j", 1, "n1", "n2"), bad, old)
    assert {n.node: (n.verdict, n.holds) for n in views.nodes()} == {
        "n1": ("ready", ("j/1",)),
        "n2": ("quarantined", ("j/1",)),
    }
    views.fold([ListLog().append(released("j", 1, "n1", 1))])
    assert [n.holds for n in views.nodes()] == [(), ("j/1",)]
    views.fold([ListLog().append(joined("n2", epoch="b2"))])
    assert [(n.verdict, n.holds) for n in views.nodes()] == [("ready", ()), ("validating", ())]


@st.composite
def logs(draw: st.DrawFn) -> list[Recorded]:
    """Jobs, attempts and nodes in random but possible orders, with repeats, and events of jobs that nobody knows."""
    log = ListLog()
    attempts: dict[str, int] = {}
    for _ in range(draw(st.integers(0, 40))):
        log.at_ms += draw(st.integers(0, 50))
        job_id, node = draw(st.sampled_from(("j1", "j2", "j3"))), draw(st.sampled_from(NODES))
        number = attempts.get(job_id, 0)
        kind = draw(st.integers(0, 16))
        if kind == 2:
            number = attempts[job_id] = number + draw(st.integers(0, 1))
        of = {"job_id": job_id, "attempt": number}
        events: list[Event] = [
            joined(node, epoch=draw(st.sampled_from(("b1", "b2")))),
            submitted(job_id),
            placed(job_id, number, *draw(st.permutations(NODES))[: draw(st.integers(1, 3))]),
            AttemptPrepared(**of, node=node, fence=1),
            PreflightStarted(node=node, boot_epoch="b1", round=1, **of),
            PreflightPassed(**of, nodes=(node,)),
            started(job_id, number, node, 1),
            AttemptProgressed(**of, step=draw(st.integers(0, 9))),
            exited(job_id, number, node, 1, "user_error"),
            released(job_id, number, node, 1),
            sealed(job_id, number, node, 1),
            JobRequeued(**of, outcome="infra_gpu", cause="XID 79"),
            finished(job_id, number),
            CancelRequested(job_id=job_id),
            ready(node),
            NodeQuarantined(node=node, boot_epoch="b1", rule="xid", reason="XID 79"),
            PendingReasonChanged(job_id=job_id, reasons=(Reason(code="no_room", message="m"),)),
        ]
        log.append(events[kind])
    return log.records


def content(views: Views) -> tuple[Any, ...]:
    return views.jobs((), 100, None), views.nodes(), views.position(), views.inventory()


@settings(deadline=None, max_examples=60)
@given(logs(), st.data())
def test_the_model_is_the_same_however_the_log_was_cut(records: list[Recorded], data: st.DataObject) -> None:
    whole, pieces = Views(open_engine(None)), Views(open_engine(None))
    if records:
        whole.fold(records)
    at = 0
    while at < len(records):
        size = data.draw(st.integers(1, len(records) - at))
        pieces.fold(records[at : at + size])
        pieces.inventory()  # kept at hand, and must not grow old
        at += size
    assert content(pieces) == content(whole)


async def projected(log: MemoryLog, database: Path) -> Views:
    """A read model that has caught up, as a gateway makes it when it starts; stopped again."""
    views, caught_up = Views(open_engine(database)), asyncio.Event()
    task = asyncio.create_task(project(log, views, caught_up.set))
    await asyncio.wait_for(caught_up.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return views


async def history(*job_ids: str) -> MemoryLog:
    log = MemoryLog()
    for job_id in job_ids:
        await log.append(stamp(submitted(job_id), "test"))
    return log


async def test_a_restart_goes_on_where_the_last_process_stopped(tmp_path: Path) -> None:
    log = await history("j1")
    before = await projected(log, tmp_path / "views.db")
    assert before.position().seq == 1
    await log.append(stamp(submitted("j2"), "test"))
    after = await projected(log, tmp_path / "views.db")
    assert content(after) == content(await projected(log, tmp_path / "fresh.db"))
    assert [place for place, _ in after.jobs((), 10, None)] == [2, 1]


@pytest.mark.parametrize("jobs", [("other",), ("other1", "other2", "other3")])
async def test_another_log_makes_it_start_anew(tmp_path: Path, jobs: tuple[str, ...]) -> None:
    await projected(await history("j1", "j2"), tmp_path / "views.db")
    views = await projected(await history(*jobs), tmp_path / "views.db")
    assert sorted(job.job_id for _, job in views.jobs((), 10, None)) == sorted(jobs)


async def test_a_model_of_an_older_shape_is_rebuilt(tmp_path: Path) -> None:
    log = await history("j1")
    before = await projected(log, tmp_path / "views.db")
    with before._engine.begin() as connection:
        connection.execute(text("UPDATE checkpoint SET schema = 0"))
        connection.execute(text("UPDATE jobs SET view = 'of another shape'"))
    views = Views(open_engine(tmp_path / "views.db"))
    assert views.position() == Position()
    assert content(await projected(log, tmp_path / "views.db")) == content(await projected(log, tmp_path / "fresh.db"))


async def test_a_fold_that_fails_leaves_model_and_checkpoint_as_they_were(tmp_path: Path) -> None:
    log = ListLog()
    views = Views(open_engine(tmp_path / "views.db"))
    views.fold([log.append(submitted("j1"))])
    before = content(views)
    second = log.append(submitted("j2"))
    broken = JobSubmitted.model_construct(job_id="j3", spec=cast(JobSpec, None), spec_hash="h")
    with pytest.raises(AttributeError):
        views.fold([second, Recorded(seq=3, at_ms=1, envelope=second.envelope, event=broken)])
    assert content(views) == before
