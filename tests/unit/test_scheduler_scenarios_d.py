"""Quota and accounts that other schedulers leak, as tests of this one."""

from __future__ import annotations

import logging
import random

import pytest

from stoker_proto import CancelRequested, DecisionBatch, NodeDegraded, NodeQuarantined, NodeUnknown
from stoker_scheduler import answers
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.evolve import evolve
from stoker_scheduler.invariants import violations
from stoker_scheduler.state import State, state_hash
from tests.builders import ListLog, exited, joined, ready, released, sealed, started, submitted
from tests.unit.scheduler_cluster import Cluster

MINUTE = 60_000
LOW = {"priority_class": "BEST_EFFORT"}


def told(cluster: Cluster, queue: str) -> dict[str, object]:
    """What `stoker queue` says of it."""
    every = answers.queues(cluster.scheduler.cycle(cluster.log.at_ms)).queues
    return next(q for q in every if q.name == queue).model_dump()


@pytest.mark.parametrize("when", ["placed", "running", "failed", "waiting for blame"])
def test_D1_quota_is_charged_as_long_as_something_is_held_whenever_the_eviction_comes(when: str) -> None:
    cluster = Cluster(check=True)
    cluster.configure(scheduling={"min_run_minutes": 0})
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("low", nodes=2, **LOW))
    fence = cluster.attempt("low").fence
    if when != "placed":
        cluster.start("low")
    if when in ("failed", "waiting for blame"):
        cluster.tell(exited("low", 1, "n1", fence, "infra_comm"))
    if when == "waiting for blame":
        cluster.stopped("low")
    cluster.tell(submitted("high", nodes=2))
    if when != "waiting for blame":
        assert cluster.state.usage.of("default") == 4000, "it holds all of it until it is proven gone"
        cluster.tell(exited("low", 1, "n2", fence, "cancelled", asked=cluster.attempt("low").stop))
        cluster.tell(released("low", 1, "n2", fence))
        assert cluster.state.usage.of("default") == 2000
        cluster.stopped("low")
    assert len(cluster.places("high")) == 2
    assert cluster.state.usage.of("default") == 4000, "charged to the one that holds it"
    cluster.start("high")
    cluster.end("high")
    cluster.later(MINUTE)
    for job_id in list(cluster.state.active):
        cluster.start(job_id)
        cluster.end(job_id)
    assert (cluster.ended("low").state, cluster.state.usage.of("default")) == ("succeeded", 0)


def test_D1_a_charge_without_an_allocation_is_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    log, scheduler = ListLog(), Scheduler(Timing(), check_every=1)
    scheduler.evolve(log.append(joined("n1")))
    assert caplog.records == []
    scheduler.state.usage.add("default", (("SIM", 1000),), firm=False)
    with caplog.at_level(logging.ERROR):
        scheduler.evolve(log.append(ready("n1")))
    assert any("INV4 queue default is charged 1000" in record.getMessage() for record in caplog.records)


def test_D2_usage_returns_to_nothing_though_queue_labels_and_class_are_gone_when_the_job_ends() -> None:
    cluster = Cluster(check=True)
    kept = [{"name": "BEST_EFFORT", "value": 0}, {"name": "NORMAL", "value": 1}]
    firm = {"name": "FIRM", "value": 2, "preemptible": False}
    cluster.configure(
        queues=[{"name": "lab", "gpus": {"nominal": 4}}, {"name": "team", "parent": "lab", "gpus": {"nominal": 4}}],
        classes=[*kept, firm],
    )
    cluster.tell(joined("n1", labels={"rack": "r1"}), ready("n1"), joined("n2", labels={"rack": "r1"}), ready("n2"))
    cluster.run(submitted("j", nodes=2, within="rack", queue="team", priority_class="FIRM"))
    assert (cluster.state.usage.of("lab"), cluster.state.usage.firm_of("lab")) == (4000, 4000)
    cluster.configure(queues=[{"name": "lab", "gpus": {"nominal": 4}}], classes=kept, topology=[])
    cluster.tell(submitted("waits", nodes=2, queue="team"), submitted("also", queue="lab"))
    assert "unknown_queue" in cluster.codes("waits")
    cluster.end("j")
    assert cluster.ended("j").state == "succeeded"
    for name in ("lab", "team"):
        assert cluster.state.usage.of(name) == (2000 if name == "lab" else 0)
        assert cluster.state.usage.firm_of(name) == 0
    cluster.start("also")
    cluster.end("also")
    assert not any(milli for held in cluster.state.usage.held.values() for milli in held.values())


def test_D4_two_jobs_that_want_the_one_gpu_that_is_lent_do_not_both_get_it() -> None:
    cluster = Cluster(check=True)
    cluster.configure(
        queues=[
            {"name": "a", "gpus": {"nominal": 0}},
            {"name": "b", "gpus": {"nominal": 0}},
            {"name": "owner", "gpus": {"nominal": 2, "lend": 1}},
        ]
    )
    cluster.nodes("n1")
    cluster.tell(submitted("ja", per_node=1, queue="a"), submitted("jb", per_node=1, queue="b"))
    assert list(cluster.state.active) == ["ja"]
    assert cluster.codes("jb")[0] == "kept_by_others"
    cluster.tell(submitted("mine", per_node=1, queue="owner"))
    assert cluster.places("mine") == ("n1",)


def test_D4_nor_do_two_jobs_below_one_limit() -> None:
    cluster = Cluster(check=True)
    cluster.configure(
        queues=[
            {"name": "lab", "gpus": {"limit": 1}},
            {"name": "a", "parent": "lab"},
            {"name": "b", "parent": "lab"},
        ]
    )
    cluster.nodes("n1")
    cluster.tell(submitted("ja", per_node=1, queue="a"), submitted("jb", per_node=1, queue="b"))
    assert list(cluster.state.active) == ["ja"]
    assert cluster.codes("jb")[0] == "queue_limit"


def test_D6_a_limit_of_four_holds_and_gpu_time_is_charged() -> None:
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "q", "gpus": {"limit": 4}}, {"name": "default"}])
    cluster.nodes("n1", gpus=8)
    for number in range(5):
        cluster.tell(submitted(f"j{number}", per_node=1, queue="q"))
    assert len(cluster.state.active) == 4
    reason = cluster.job("j4").reasons[0]
    assert reason.code == "queue_limit"
    assert (reason.facts["used_gpus"], reason.facts["bound_gpus"], reason.facts["asked_gpus"]) == (4.0, 4.0, 1.0)
    cluster.start("j0")
    cluster.log.at_ms += 30 * MINUTE
    cluster.end("j0")
    assert cluster.ended("j0").gpu_ms == 30 * MINUTE
    assert cluster.places("j4") == ("n1",)
    status = told(cluster, "q")
    assert (status["used"], status["past_gpu_hours"]) == (4.0, 0.5)


def test_D6_what_was_used_counts_against_the_queue_that_used_it() -> None:
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "heavy"}, {"name": "light"}])
    cluster.nodes("n1", gpus=1)
    cluster.run(submitted("h0", per_node=1, queue="heavy"))
    cluster.tell(submitted("h1", per_node=1, queue="heavy"), submitted("l0", per_node=1, queue="light"))
    cluster.log.at_ms += 120 * MINUTE
    cluster.end("h0")
    assert list(cluster.state.active) == ["l0"], "the other came first, but its queue has had its share"


@pytest.mark.parametrize("verdict", [NodeDegraded, NodeUnknown])
def test_D7_gpus_in_use_on_nodes_that_take_no_work_count_as_capacity_too(
    verdict: type[NodeDegraded | NodeUnknown],
) -> None:
    cluster = Cluster(check=True)
    cluster.configure(
        queues=[{"name": "user", "gpus": {"nominal": 0}}, {"name": "owner", "gpus": {"nominal": 2, "lend": 1}}]
    )
    cluster.nodes("n1", "n2")
    cluster.run(submitted("a", queue="user"))
    assert cluster.codes("a") == []
    cluster.run(submitted("b", per_node=1, queue="user"))
    for node in ("n1", "n2"):
        cluster.tell(verdict(node=node, boot_epoch="b1", rule="r", reason="for repair"))
    cluster.tell(submitted("c", per_node=1, queue="user"))
    assert cluster.places("c") == ()
    cluster.nodes("n3")
    assert cluster.places("c") == ("n3",), "an empty healthy node does not stay idle"
    shown = answers.queues(cluster.scheduler.cycle(cluster.log.at_ms))
    assert shown.gpus == 5.0, "two that take work, and three in use elsewhere"


def test_D9_after_a_refused_launch_nothing_stays_charged_and_later_jobs_run() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.tell(submitted("j", limits={"max_retries": 0}), submitted("later"))
    fence = cluster.attempt("j").fence
    cluster.tell(exited("j", 1, "n1", fence, "launch_rejected"), released("j", 1, "n1", fence))
    assert cluster.state.holders("n1") <= {"later"}
    cluster.later(30_000)
    assert cluster.ended("j").outcome == "launch_rejected"
    assert cluster.places("later") == ("n1",)
    cluster.start("later")
    cluster.end("later")
    assert cluster.state.usage.of("default") == 0


def a_history() -> ListLog:
    """Preemptions, retries, a cancel, a reboot, a quarantine and a silent node, in order."""
    cluster = Cluster(Timing(fence_ms=MINUTE))
    cluster.configure(
        scheduling={"min_run_minutes": 0},
        queues=[{"name": "default", "gpus": {"nominal": 2}}, {"name": "guests", "gpus": {"nominal": 0}}],
    )
    cluster.nodes("n1", "n2", "n3")
    cluster.run(submitted("g1", queue="guests"), submitted("g2", queue="guests"), submitted("low", **LOW))
    cluster.tell(submitted("high"), submitted("pair", nodes=2, queue="guests"))
    for victim in cluster.preempted():
        cluster.stopped(victim)
    cluster.tell(NodeQuarantined(node="n3", boot_epoch="b1", rule="xid", reason="XID 79"))
    cluster.tell(joined("n3", epoch="b2"), ready("n3", "b2"), CancelRequested(job_id="g1"))
    cluster.tell(NodeUnknown(node="n2", boot_epoch="b1", rule="silence", reason="no heartbeat"))
    cluster.later(2 * MINUTE)
    for job_id in list(cluster.state.active):
        attempt = cluster.attempt(job_id)
        for node in cluster.places(job_id):
            cluster.tell(started(job_id, attempt.number, node, attempt.fence))
            cluster.tell(exited(job_id, attempt.number, node, attempt.fence, "infra_comm"))
            cluster.tell(released(job_id, attempt.number, node, attempt.fence))
            cluster.tell(sealed(job_id, attempt.number, node, attempt.fence))
    cluster.later(MINUTE)
    assert sum(isinstance(r.event, DecisionBatch) for r in cluster.log.records) > 8
    return cluster.log


def test_D10_no_count_goes_wrong_in_whatever_order_and_how_often_events_come() -> None:
    original = a_history()
    for seed in range(30):
        chance = random.Random(seed)
        events = [(chance.gauss(at, 8), record.event) for at, record in enumerate(original.records)]
        events += [(chance.gauss(at, 30), event) for at, event in chance.choices(events, k=len(events) // 2)]
        log, state = ListLog(), State()
        for _, event in sorted(events, key=lambda pair: pair[0]):
            log.at_ms += chance.randrange(-1000, 5000)
            state = evolve(state, log.append(event))
            assert violations(state) == [], f"seed {seed}, after {event}"


def test_D10_every_event_told_twice_in_a_row_changes_nothing() -> None:
    once, twice = State(), State()
    for record in a_history().records:
        once = evolve(once, record)
        twice = evolve(evolve(twice, record), record)
    once.ignored = twice.ignored = once.voided = twice.voided = 0
    assert state_hash(once) == state_hash(twice)


def test_gpus_that_pass_from_one_job_of_a_queue_to_another_are_charged_once() -> None:
    cluster = Cluster(check=True)
    cluster.configure(
        scheduling={"min_run_minutes": 0},
        queues=[{"name": "a", "gpus": {"nominal": 4, "limit": 4}}, {"name": "b", "gpus": {"nominal": 2}}],
    )
    cluster.nodes("n1", "n2")
    cluster.run(submitted("low", queue="a", **LOW), submitted("other", queue="a"))
    cluster.tell(submitted("high", queue="a", priority_class="CRITICAL"))
    assert cluster.preempted() == ["low"]
    cluster.tell(submitted("b", per_node=1, queue="b"))
    assert cluster.preempted() == ["low"], "the first queue holds no more than its own"
    assert cluster.codes("b") == ["gpus_busy"]
    cluster.tell(submitted("second", queue="a", priority_class="CRITICAL"))
    assert sorted(cluster.preempted()) == ["low", "other"]
    cluster.tell(submitted("third", queue="a", priority_class="CRITICAL"))
    assert cluster.codes("third")[0] == "queue_limit"
    cluster.stopped("low")
    cluster.stopped("other")
    assert (len(cluster.places("high")), len(cluster.places("second")), cluster.places("b")) == (1, 1, ())
