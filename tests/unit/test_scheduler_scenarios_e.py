"""Scenarios E, two truths: what the log says of launches, cancels and ends, and what happens on the nodes."""

from __future__ import annotations

import pytest

from stoker_proto import (
    AttemptExited,
    AttemptPrepared,
    CancelRequested,
    DecisionBatch,
    Event,
    JobFinished,
    NodeUnknown,
    Requeue,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.desired import desired
from stoker_scheduler.state import STRIKES
from tests.builders import exited, joined, ready, released, sealed, started, submitted
from tests.unit.scheduler_cluster import Cluster

MINUTE_MS = 60_000
AT_ONCE = {"scheduling": {"min_run_minutes": 0}}


def busy(timing: Timing | None = None) -> Cluster:
    """One node, and the job `low` on all of it, which gives way to any job of a higher class."""
    cluster = Cluster(timing, check=True)
    cluster.configure(**AT_ONCE)
    cluster.nodes("n1")
    cluster.run(submitted("low"))
    return cluster


def urgent(job_id: str, **fields: object) -> Event:
    return submitted(job_id, priority_class="CRITICAL", **fields)


def wanted(cluster: Cluster, node: str = "n1") -> list[tuple[str, int, str]]:
    """What the launcher of the node is told to make true."""
    return [(a.job_id, a.attempt, a.want) for a in desired(cluster.state)[node].attempts]


def killed(job_id: str, attempt: int, fence: int) -> AttemptExited:
    return exited(job_id, attempt, "n1", fence, "infra_node")


def test_E1_a_late_report_of_the_preempted_attempt_does_not_touch_the_next_one_on_the_same_node() -> None:
    cluster = busy()
    old = cluster.attempt("low").fence
    cluster.tell(urgent("p"))
    cluster.stopped("low")
    cluster.start("p")
    cluster.end("p")
    cluster.start("low")
    assert (cluster.places("low"), cluster.attempt("low").number) == (("n1",), 2)
    before, ignored = cluster.attempt("low"), cluster.state.ignored
    late = (
        killed("low", 1, old), killed("low", 2, old), released("low", 1, "n1", old), released("low", 2, "n1", old),
        started("low", 1, "n1", old), sealed("low", 1, "n1", old),
    )  # fmt: skip
    for count, event in enumerate(late, start=1):
        cluster.tell(event)
        assert cluster.state.ignored == ignored + count
    assert cluster.attempt("low") == before
    assert cluster.state.holders("n1") == {"low"}


def test_E1_a_late_refusal_of_an_old_attempt_is_not_held_against_the_node() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    for number in range(STRIKES):
        cluster.run(submitted(f"j{number}"))
        fence = cluster.attempt(f"j{number}").fence
        cluster.end(f"j{number}")
        cluster.tell(exited(f"j{number}", 1, "n1", fence, "launch_rejected"))
    assert cluster.state.nodes["n1"].strikes == ()


@pytest.mark.parametrize("proof", ["released", "rebooted", "fenced"])
def test_E2_gpus_of_a_preempted_job_are_not_reused_before_its_launcher_confirms_or_is_fenced(proof: str) -> None:
    cluster = busy(Timing(fence_ms=5 * MINUTE_MS))
    cluster.tell(urgent("p"))
    assert cluster.attempt("low").stop == "preempted"
    for _ in range(20):
        cluster.later(MINUTE_MS)
        assert cluster.places("p") == (), "the launcher is offline: nobody knows whether the process still runs"
        assert cluster.state.holders("n1") == {"low"}
    assert wanted(cluster) == [("low", 1, "stop")]
    match proof:
        case "released":
            cluster.stopped("low")
        case "rebooted":
            cluster.tell(joined("n1", epoch="b2"))
            cluster.tell(ready("n1", "b2"))
        case "fenced":
            cluster.tell(NodeUnknown(node="n1", boot_epoch="b1", rule="silence", reason="no heartbeat"))
            cluster.later(5 * MINUTE_MS - 1)
            assert cluster.state.holders("n1") == {"low"}
            cluster.later(1)
            assert cluster.state.holders("n1") == set()
            assert cluster.places("p") == (), "fenced, but nobody knows yet that the node works"
            cluster.tell(joined("n1", epoch="b2"))
            cluster.tell(ready("n1", "b2"))
    assert cluster.places("p") == ("n1",)
    assert cluster.preempted() == ["low"]


def _prepared(cluster: Cluster, node: str) -> AttemptPrepared:
    return AttemptPrepared(job_id="j", attempt=1, node=node, fence=cluster.attempt("j").fence)


@pytest.mark.parametrize("stage", ["queued", "decided", "placed", "prepared", "half started", "running", "half gone"])
def test_E3_a_cancel_at_any_stage_ends_with_everything_released(stage: str) -> None:
    cluster = Cluster(check=True)
    if stage != "queued":
        cluster.nodes("n1", "n2")
    if stage == "decided":
        cluster.fold(submitted("j", nodes=2))
        (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
        cluster.fold(CancelRequested(job_id="j"))
        cluster.fold(batch)
    else:
        cluster.tell(submitted("j", nodes=2))
    if stage == "prepared":
        cluster.tell(*(_prepared(cluster, node) for node in cluster.places("j")))
    if stage == "half started":
        cluster.tell(started("j", 1, "n1", cluster.attempt("j").fence))
    if stage in ("running", "half gone"):
        cluster.start("j")
    if stage == "half gone":
        cluster.tell(exited("j", 1, "n2", cluster.attempt("j").fence))
    cluster.tell(CancelRequested(job_id="j"))
    if stage not in ("queued", "decided"):
        assert {node: wanted(cluster, node) for node in ("n1", "n2")} == {
            "n1": [("j", 1, "stop")],
            "n2": [("j", 1, "stop")],
        }, "the stop goes to every node that it was offered to"
        cluster.stopped("j")
    assert cluster.ended("j").state == "cancelled"
    assert cluster.ended("j").attempts <= 1
    assert not any(cluster.state.owner.values())
    cluster.tell(submitted("next", nodes=2 if stage != "queued" else 1))
    assert len(cluster.places("next")) == (2 if stage != "queued" else 0)


def test_E3_nobody_gives_way_for_a_job_that_was_cancelled_before_the_decision_landed() -> None:
    cluster = busy()
    cluster.fold(urgent("p"))
    (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    assert {a.action for a in batch.actions} == {"stop", "claim"}
    cluster.fold(CancelRequested(job_id="p"))
    cluster.fold(batch)
    assert cluster.state.voided == 2
    assert cluster.attempt("low").stop is None
    cluster.decide()
    assert cluster.ended("p").state == "cancelled"


def test_E2_nobody_gives_way_on_a_node_that_fell_away_before_the_decision_landed() -> None:
    cluster = busy()
    cluster.nodes("n2")
    cluster.run(submitted("other"))
    cluster.fold(urgent("p", nodes=2))
    (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    cluster.fold(NodeUnknown(node="n2", boot_epoch="b1", rule="silence", reason="no heartbeat"))
    cluster.fold(batch)
    assert cluster.state.voided == 3
    assert (cluster.attempt("low").stop, cluster.attempt("other").stop) == (None, None)
    assert cluster.state.claims == {}


def test_E4_a_cancel_while_no_scheduler_runs_is_carried_out_by_the_next_one() -> None:
    cluster = busy()
    cluster.tell(submitted("waiting"))
    cluster.fold(CancelRequested(job_id="low"))
    cluster.fold(CancelRequested(job_id="waiting"))
    cluster.log.at_ms += 10 * MINUTE_MS
    cluster.restart()
    cluster.decide()
    assert cluster.ended("waiting").state == "cancelled"
    assert cluster.attempt("low").stop == "cancelled"
    cluster.stopped("low")
    assert cluster.ended("low").state == "cancelled"


def test_E4_a_success_that_is_decided_stays_one_whatever_comes_after_a_crash() -> None:
    cluster = busy()
    fence = cluster.attempt("low").fence
    for event in (exited("low", 1, "n1", fence), released("low", 1, "n1", fence), sealed("low", 1, "n1", fence)):
        cluster.fold(event)
    (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    cluster.fold(batch)
    cluster.restart()
    cluster.fold(CancelRequested(job_id="low"))
    cluster.fold(killed("low", 1, fence))
    cluster.decide()
    told = [r.event for r in cluster.log.records if isinstance(r.event, JobFinished)]
    assert [(f.job_id, f.state) for f in told] == [("low", "succeeded")], "told once, by the one who took over"
    cluster.restart()
    assert cluster.decide() == []
    assert cluster.state.over["low"].state == "succeeded"


def test_E6_a_job_without_checkpoints_is_stopped_and_runs_again_from_its_start_with_one_owner_at_a_time() -> None:
    cluster = busy()
    assert cluster.job("low").spec.outputs.checkpoints is None
    cluster.tell(urgent("p"))
    assert cluster.attempt("low").grace_ms == 10_000
    cluster.later(10_000)
    assert cluster.state.holders("n1") == {"low"}, "preempted is not gone: the grace is over and it may still run"
    assert cluster.places("p") == ()
    cluster.stopped("low")
    assert cluster.places("p") == ("n1",)
    assert cluster.job("low").state == "queued"
    requeued = [a for r in cluster.log.records if isinstance(r.event, DecisionBatch) for a in r.event.actions]
    assert [(a.outcome, a.charged) for a in requeued if isinstance(a, Requeue)] == [("preempted", False)]
    cluster.start("p")
    cluster.end("p")
    assert cluster.attempt("low").number == 2


def test_E8_the_duty_to_release_stays_until_it_is_done_through_restarts_and_however_long() -> None:
    cluster = busy()
    cluster.tell(CancelRequested(job_id="low"))
    for _ in range(10):
        assert cluster.later(MINUTE_MS) == [], "nobody gives up, and nobody asks twice"
        cluster.restart()
        assert wanted(cluster) == [("low", 1, "stop")]
        assert cluster.state.holders("n1") == {"low"}
    cluster.tell(submitted("next"))
    assert cluster.codes("next") == ["reserved"]
    assert cluster.job("next").reasons[0].blockers == ("low",)
    cluster.stopped("low")
    assert cluster.ended("low").state == "cancelled"
    assert cluster.places("next") == ("n1",)


def test_E9_a_cancelled_job_is_active_and_charged_until_its_exit_is_proven() -> None:
    cluster = busy()
    cluster.log.at_ms += 50_000
    cluster.tell(CancelRequested(job_id="low"))
    assert cluster.job("low").state == "active"
    assert cluster.attempt("low").grace_ms == 10_000, "the launcher kills it after this at the latest"
    cluster.later(10_000)
    assert not any(isinstance(r.event, JobFinished) for r in cluster.log.records)
    assert cluster.state.usage.of("default") == 2_000
    cluster.stopped("low")
    told = cluster.ended("low")
    assert (told.state, told.gpu_ms) == ("cancelled", 2 * 60_000)
    assert cluster.state.usage.of("default") == 0
