"""Gangs that other schedulers place, lose or stop by halves, as tests of this one."""

from __future__ import annotations

import pytest

from stoker_proto import (
    DecisionBatch,
    Event,
    JobRequeued,
    JobSubmitted,
    NodeQuarantined,
    NodeReleased,
    NodeUnknown,
    Place,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.desired import desired
from tests.builders import exited, joined, ready, released, sealed, spec, started, submitted
from tests.unit.scheduler_cluster import Cluster

MINUTE = 60_000


def names(count: int) -> list[str]:
    return [f"n{number:03d}" for number in range(count)]


def quarantined(node: str) -> NodeQuarantined:
    return NodeQuarantined(node=node, boot_epoch="b1", rule="xid", reason="XID 79")


def silent(node: str) -> NodeUnknown:
    return NodeUnknown(node=node, boot_epoch="b1", rule="silence", reason="no heartbeat")


def held_by(cluster: Cluster, job_id: str) -> list[str]:
    """Nodes on which the job holds something."""
    return [name for name in cluster.state.nodes if job_id in cluster.state.holders(name)]


def wanted(cluster: Cluster, job_id: str) -> dict[str, str]:
    """What each node's launcher is to do with the job."""
    return {
        node: assignment.want
        for node, assignments in desired(cluster.state).items()
        for assignment in assignments.attempts
        if assignment.job_id == job_id
    }


def test_C1_of_two_gangs_of_a_hundred_nodes_one_runs_whole_and_the_other_holds_nothing() -> None:
    cluster = Cluster(check=True)
    for node in names(100):
        cluster.fold(joined(node, 1))
        cluster.fold(ready(node))
    cluster.tell(submitted("a", nodes=100, per_node=1), submitted("b", nodes=100, per_node=1))
    assert (len(held_by(cluster, "a")), len(held_by(cluster, "b"))) == (100, 0)
    assert cluster.state.usage.of("default") == 100_000
    cluster.later(60 * MINUTE)
    assert held_by(cluster, "b") == []


def test_C2_a_gang_that_loses_a_node_gives_back_all_eight_and_is_formed_first_again() -> None:
    cluster = Cluster(check=True)
    cluster.nodes(*names(8))
    cluster.run(submitted("gang", nodes=8))
    bad = cluster.places("gang")[3]
    cluster.tell(quarantined(bad))
    assert set(wanted(cluster, "gang").values()) == {"stop"}
    cluster.tell(submitted("fresh"))
    cluster.stopped("gang")
    assert held_by(cluster, "gang") == []
    assert cluster.job("gang").state == "queued"
    assert cluster.places("fresh") == (), "the gang's nodes are kept for it for a while"
    cluster.later(MINUTE)
    cluster.tell(NodeReleased(node=bad, boot_epoch="b1", rule="retest", reason="passed"))
    assert len(cluster.places("gang")) == 8


def test_C2_what_is_kept_for_a_gang_that_cannot_come_back_goes_to_others_in_the_end() -> None:
    cluster = Cluster(check=True)
    cluster.nodes(*names(4))
    cluster.run(submitted("gang", nodes=4))
    cluster.tell(quarantined("n003"), submitted("fresh"))
    cluster.stopped("gang")
    assert cluster.places("fresh") == ()
    assert cluster.codes("fresh") == ["kept_for_others"]
    cluster.later(10 * MINUTE)
    assert len(cluster.places("fresh")) == 1, "the node has not come back"


@pytest.mark.parametrize("how", ["silent", "rebooted"])
def test_C4_a_gang_without_one_of_its_nodes_is_released_though_nobody_competes(how: str) -> None:
    cluster = Cluster(Timing(fence_ms=5 * MINUTE), check=True)
    cluster.nodes(*names(4))
    cluster.run(submitted("gang", nodes=4))
    gone: Event = silent("n003") if how == "silent" else joined("n003", epoch="b2")
    cluster.tell(gone)
    cluster.later(5 * MINUTE if how == "silent" else 0)
    assert wanted(cluster, "gang") == {"n000": "stop", "n001": "stop", "n002": "stop"}
    cluster.stopped("gang")
    assert held_by(cluster, "gang") == []
    assert cluster.job("gang").state == "queued"
    assert cluster.state.usage.of("default") == 0


def test_C5_of_two_gangs_that_lose_a_node_each_one_runs_whole_and_the_other_holds_nothing() -> None:
    cluster = Cluster(check=True)
    cluster.nodes(*names(4))
    cluster.run(submitted("a", nodes=2), submitted("b", nodes=2))
    lost = [cluster.places("a")[0], cluster.places("b")[0]]
    cluster.tell(*(quarantined(node) for node in lost))
    cluster.stopped("a")
    cluster.stopped("b")
    cluster.later(10 * MINUTE)
    assert sorted(held_by(cluster, "a")) == sorted(set(names(4)) - set(lost))
    assert held_by(cluster, "b") == []


def test_C6_a_refused_launch_on_one_node_ends_the_attempt_and_the_whole_gang_is_tried_once_more() -> None:
    cluster = Cluster(check=True)
    cluster.nodes(*names(4))
    cluster.tell(submitted("gang", nodes=3))
    fence, nodes = cluster.attempt("gang").fence, cluster.places("gang")
    cluster.tell(exited("gang", 1, nodes[1], fence, "launch_rejected"))
    assert set(wanted(cluster, "gang").values()) == {"stop"}
    cluster.stopped("gang")
    cluster.later(30_000)
    (requeued,) = [r.event for r in cluster.log.records if isinstance(r.event, JobRequeued)]
    assert (requeued.outcome, requeued.attempt, requeued.exclude_nodes) == ("launch_rejected", 1, (nodes[1],))
    assert cluster.attempt("gang").number == 2
    assert sorted(cluster.places("gang")) == sorted(set(names(4)) - {nodes[1]})
    cluster.start("gang")
    cluster.end("gang")
    assert (cluster.ended("gang").state, cluster.ended("gang").attempts) == ("succeeded", 2)


def test_C6_a_gang_that_needs_every_node_comes_back_when_the_one_that_refused_it_is_tried_again() -> None:
    cluster = Cluster(check=True)
    cluster.nodes(*names(3))
    cluster.tell(submitted("gang", nodes=3))
    cluster.tell(exited("gang", 1, "n001", cluster.attempt("gang").fence, "launch_rejected"))
    cluster.stopped("gang")
    for _ in range(12):
        cluster.later(MINUTE)
    assert len(cluster.places("gang")) == 3


def test_C8_a_stop_goes_to_every_node_also_to_one_that_never_answered_and_gpus_wait_for_its_proof() -> None:
    cluster = Cluster(Timing(start_deadline_ms=3 * MINUTE), check=True)
    cluster.nodes(*names(4))
    cluster.tell(submitted("gang", nodes=4))
    fence = cluster.attempt("gang").fence
    cluster.tell(*(started("gang", 1, node, fence) for node in names(3)))
    cluster.later(3 * MINUTE)
    assert wanted(cluster, "gang") == dict.fromkeys(names(4), "stop")
    cluster.tell(submitted("next"), submitted("pair", nodes=2))
    for node in names(3):
        cluster.tell(exited("gang", 1, node, fence, "cancelled", asked="lost"), released("gang", 1, node, fence))
        cluster.tell(sealed("gang", 1, node, fence))
    cluster.later(60 * MINUTE)
    assert held_by(cluster, "gang") == ["n003"], "it did start there, whatever it said"
    assert wanted(cluster, "gang") == {"n003": "stop"}
    assert "n003" not in (*cluster.places("next"), *cluster.places("pair"))
    cluster.tell(started("gang", 1, "n003", fence), exited("gang", 1, "n003", fence, "cancelled", asked="lost"))
    cluster.tell(released("gang", 1, "n003", fence), sealed("gang", 1, "n003", fence))
    assert held_by(cluster, "gang") == []


def test_C9_a_gang_cannot_be_resized_in_flight_and_a_decision_of_another_size_is_void() -> None:
    cluster = Cluster(check=True)
    cluster.nodes(*names(4))
    cluster.fold(submitted("gang", nodes=2))
    (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    (place,) = batch.actions
    assert isinstance(place, Place)
    cluster.fold(JobSubmitted(job_id="gang", spec=spec(nodes=4), spec_hash="other"))
    assert cluster.job("gang").demand.nodes == 2, "a spec never changes"
    thin = tuple(a.model_copy(update={"gpus": a.gpus[:1]}) for a in place.allocations)
    twice = (place.allocations[0], place.allocations[0].model_copy(update={"node_rank": 1}))
    for wrong in (place.allocations[:1], thin, twice):
        before = cluster.state.voided
        action = place.model_copy(update={"allocations": wrong})
        cluster.fold(batch.model_copy(update={"actions": (action,)}))
        assert cluster.state.voided == before + 1
        assert held_by(cluster, "gang") == []
    cluster.fold(batch)
    assert len(held_by(cluster, "gang")) == 2
