"""Preemption that thrashes in other schedulers, as tests of this one: given, when, then."""

from __future__ import annotations

import pytest

from stoker_proto import (
    DecisionBatch,
    ExplainAsked,
    Explained,
    JobBoosted,
    JobSubmitted,
    PlanAsked,
    Planned,
    Stop,
)
from stoker_scheduler import answers
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from tests.builders import joined, ready, submitted
from tests.unit.scheduler_cluster import Cluster

MINUTE = 60_000
AT_ONCE = {"min_run_minutes": 0, "first_checkpoint_minutes": 0}
LOW = {"priority_class": "BEST_EFFORT"}


def cluster_of(*nodes: str, gpus: int = 2, scheduling: dict[str, object] | None = None, **fields: object) -> Cluster:
    """A checked cluster in which whoever runs may be preempted at once."""
    cluster = Cluster(check=True)
    cluster.configure(scheduling=AT_ONCE | (scheduling or {}), **fields)
    cluster.nodes(*nodes, gpus=gpus)
    return cluster


def planned(cluster: Cluster, job: JobSubmitted) -> Planned:
    """What would become of the job, were it submitted now."""
    told = answers.plan(cluster.scheduler.cycle(cluster.log.at_ms), PlanAsked(spec=job.spec))
    assert isinstance(told, Planned)
    return told


def victims_now(scheduler: Scheduler, now_ms: int) -> list[str]:
    """Whom it would preempt if it were asked now; nothing lands."""
    batches = [d.event for d in scheduler.decide(now_ms) if isinstance(d.event, DecisionBatch)]
    return [a.job_id for b in batches for a in b.actions if isinstance(a, Stop)]


def test_A1_victims_that_leave_at_different_times_are_not_readmitted() -> None:
    cluster = cluster_of("n1", "n2")
    cluster.run(submitted("a", **LOW), submitted("b", **LOW))
    cluster.tell(submitted("p", nodes=2))
    assert sorted(cluster.preempted()) == ["a", "b"]
    cluster.stopped("a")
    assert cluster.job("a").state == "queued"
    assert (cluster.places("a"), cluster.codes("a")) == ((), ["kept_for_others"])
    cluster.later(30_000)
    assert (cluster.places("a"), cluster.places("p")) == ((), ())
    assert set(cluster.state.claimed.values()) == {"p"}, "all four GPUs stay promised"
    cluster.stopped("b")
    assert sorted(cluster.places("p")) == ["n1", "n2"]
    cluster.start("p")
    cluster.later(10 * MINUTE)
    assert len(cluster.preempted()) == 2
    cluster.end("p")
    assert (len(cluster.places("a")), len(cluster.places("b"))) == (1, 1)
    assert len(cluster.preempted()) == 2


def test_A2_three_queues_at_equal_share_do_not_preempt_each_other_for_ever() -> None:
    cluster = cluster_of(
        "n1",
        gpus=4,
        queues=[
            {"name": "sure", "gpus": {"nominal": 1}},
            {"name": "x", "gpus": {"nominal": 0}},
            {"name": "y", "gpus": {"nominal": 0}},
        ],
    )
    for number in range(3):
        cluster.tell(submitted(f"x{number}", per_node=1, queue="x"), submitted(f"y{number}", per_node=1, queue="y"))
    assert sorted(cluster.state.active) == ["x0", "x1", "y0", "y1"]
    for job_id in tuple(cluster.state.active):
        cluster.start(job_id)
    cluster.tell(submitted("s", per_node=1, queue="sure"))
    (victim,) = cluster.preempted()
    assert cluster.scheduler.decide(cluster.log.at_ms) == [], "no news, no decision"
    cluster.stopped(victim)
    assert cluster.places("s") == ("n1",)
    cluster.start("s")
    for _ in range(20):
        cluster.later(MINUTE)
    assert cluster.preempted() == [victim]


@pytest.mark.parametrize("queue", ["own", "other"])
def test_A3_a_victim_that_is_older_does_not_start_again_before_its_preemptor(queue: str) -> None:
    cluster = cluster_of("n1", queues=[{"name": "own", "gpus": {"nominal": 0}}, {"name": "other"}])
    if queue == "other":
        cluster.configure(
            scheduling=AT_ONCE,
            queues=[{"name": "own", "gpus": {"nominal": 0}}, {"name": "other", "gpus": {"nominal": 2}}],
        )
    cluster.run(submitted("low", queue="own", **LOW))
    cluster.tell(submitted("high", queue=queue))
    assert cluster.preempted() == ["low"]
    cluster.stopped("low")
    assert cluster.job("low").seq < cluster.job("high").seq
    assert (cluster.places("high"), cluster.places("low")) == (("n1",), ())
    cluster.start("high")
    for _ in range(10):
        cluster.later(MINUTE)
    cluster.end("high")
    cluster.start("low")
    cluster.later(MINUTE)
    cluster.end("low")
    assert cluster.ended("low").attempts == 2
    assert cluster.preempted() == ["low"]


def test_A5_of_two_equal_victims_the_same_one_is_chosen_every_time() -> None:
    cluster = cluster_of("n1", "n2")
    cluster.tell(submitted("b", **LOW), submitted("a", **LOW))
    cluster.start("a")
    cluster.start("b")
    cluster.fold(submitted("p"))
    chosen = [victims_now(cluster.scheduler, cluster.log.at_ms) for _ in range(10)]
    other = Scheduler(Timing())
    for recorded in cluster.log.records:
        other.evolve(recorded)
    chosen.append(victims_now(other, cluster.log.at_ms))
    assert chosen == [["a"]] * 11
    cluster.decide()
    for number in range(10):
        cluster.later(1_000)
        cluster.tell(joined(f"late{number}", gpus=0), submitted(f"more{number}", **LOW))
    assert cluster.preempted() == ["a"], "the other one does not die while the first is still leaving"
    cluster.stopped("a")
    assert cluster.places("p") == ("n2",)
    assert cluster.preempted() == ["a"]


def test_A6_a_queue_whose_big_job_was_evicted_does_not_take_the_gpus_back() -> None:
    cluster = cluster_of(
        "n1",
        gpus=8,
        queues=[{"name": "deserves3", "gpus": {"nominal": 3}}, {"name": "deserves5", "gpus": {"nominal": 5}}],
    )
    cluster.run(submitted("big", per_node=4, queue="deserves3"))
    cluster.run(*(submitted(f"s{n}", per_node=1, queue="deserves5") for n in range(4)))
    cluster.tell(submitted("s4", per_node=1, queue="deserves5"))
    assert cluster.preempted() == ["big"]
    cluster.stopped("big")
    assert cluster.state.usage.of("deserves3") == 0, "its share is the lowest of all now"
    cluster.start("s4")
    cluster.tell(submitted("s5", per_node=1, queue="deserves5"))
    cluster.end("s0")
    assert cluster.places("s5") == ("n1",), "inside its nominal it goes first, though the other has waited longer"
    cluster.later(10 * MINUTE)
    assert "above_nominal" in cluster.codes("big")
    told = next(r for r in cluster.job("big").reasons if r.code == "above_nominal")
    assert (told.facts["queue"], told.facts["nominal_gpus"], told.facts["would_hold_gpus"]) == ("deserves3", 3.0, 4.0)
    assert cluster.preempted() == ["big"]


def racks() -> Cluster:
    """Two racks of two nodes; in each one a node that may be taken and one that may not."""
    cluster = cluster_of()
    for node, rack in (("n1", "r1"), ("n2", "r1"), ("n3", "r2"), ("n4", "r2")):
        cluster.tell(joined(node, labels={"rack": rack}), ready(node))
    for number, kind in enumerate(("BEST_EFFORT", "CRITICAL", "BEST_EFFORT", "CRITICAL")):
        cluster.run(submitted(f"j{number}", priority_class=kind))
    assert [cluster.places(f"j{n}") for n in range(4)] == [("n1",), ("n2",), ("n3",), ("n4",)]
    return cluster


def test_A7_nobody_is_evicted_for_a_gang_that_topology_would_not_let_start() -> None:
    cluster = racks()
    cluster.tell(submitted("gang", nodes=2, within="rack"))
    cluster.later(10 * MINUTE)
    assert cluster.preempted() == []
    cluster = racks()
    cluster.tell(submitted("anywhere", nodes=2))
    assert cluster.preempted() == ["j0", "j2"], "the very same victims serve a gang that may be split"


def test_A7_nobody_is_evicted_for_a_job_that_its_own_queue_would_not_let_start() -> None:
    cluster = cluster_of("n1", queues=[{"name": "low"}, {"name": "capped", "gpus": {"limit": 1}}])
    cluster.run(submitted("victim", queue="capped", per_node=1, **LOW))
    cluster.tell(submitted("p", queue="capped", priority_class="CRITICAL"))
    assert cluster.preempted() == []
    assert cluster.codes("p")[0] == "queue_limit"


def test_A9_a_new_queue_waits_for_natural_ends_before_it_takes_what_it_is_owed() -> None:
    cluster = cluster_of(
        "n1",
        gpus=4,
        scheduling={"preempt_after_seconds": 120},
        queues=[{"name": "churn", "gpus": {"nominal": 0}}, {"name": "new", "gpus": {"nominal": 4}}],
    )
    cluster.run(*(submitted(f"c{n}", per_node=1, queue="churn") for n in range(4)))
    cluster.tell(*(submitted(f"w{n}", per_node=1, queue="new") for n in range(4)))
    assert cluster.preempted() == []
    for number in range(3):
        cluster.later(30_000)
        cluster.end(f"c{number}")
        cluster.tell(submitted(f"more{number}", per_node=1, queue="churn"))
        cluster.start(f"w{number}")
    assert cluster.preempted() == [], "one ends every half minute, and each time an owner gets it"
    assert [cluster.places(f"w{n}") for n in range(4)] == [("n1",)] * 3 + [()]
    cluster.later(29_000)
    assert cluster.preempted() == []
    cluster.fold(submitted("unrelated", model="H100", queue="churn"))
    cluster.log.at_ms += 1_000
    told = answers.explain(cluster.scheduler.cycle(cluster.log.at_ms), ExplainAsked(job_id="w3"))
    assert isinstance(told, Explained)
    assert [(d.job_id, d.rule, d.lost_gpu_seconds) for d in told.displaces] == [("c3", "reclaim", 120.0)]
    cluster.decide()
    assert cluster.preempted() == ["c3"], "the last one did not end in time"


def test_A10_a_job_that_was_preempted_often_enough_is_left_alone_and_everybody_is_told() -> None:
    cluster = cluster_of("n1", scheduling={"max_preemptions": 2})
    cluster.run(submitted("low", **LOW))
    for number in range(2):
        cluster.tell(submitted(f"high{number}"))
        cluster.stopped("low")
        cluster.start(f"high{number}")
        cluster.end(f"high{number}")
        cluster.start("low")
    assert cluster.preempted() == ["low", "low"]
    boosts = [r.event for r in cluster.log.records if isinstance(r.event, JobBoosted)]
    assert boosts == [JobBoosted(job_id="low", cause="preempted")]
    cluster.tell(submitted("high2"))
    cluster.later(10 * MINUTE)
    assert cluster.preempted() == ["low", "low"], "immune from now on"
    assert cluster.codes("high2")[0] in ("reserved", "gpus_busy")


def test_A12_a_victim_that_is_slow_to_stop_holds_up_nobody_but_its_own_preemptor() -> None:
    cluster = cluster_of("n1", "n2", "n3")
    cluster.run(*(submitted(f"low{n}", limits={"grace_seconds": 60}, **LOW) for n in range(3)))
    cluster.tell(submitted("p0"), submitted("p1"), submitted("p2"))
    assert len(set(cluster.preempted())) == 3, "all three at once"
    slow = cluster.preempted()[0]
    for victim in cluster.preempted()[1:]:
        cluster.stopped(victim)
    waiting = [p for p in ("p0", "p1", "p2") if not cluster.places(p)]
    assert len(waiting) == 1, "the other two run while the first victim is still saving"
    assert cluster.attempt(slow).by == waiting[0]
    cluster.later(59_000)
    cluster.stopped(slow)
    assert cluster.places(waiting[0]) != ()
    assert len(cluster.preempted()) == 3


def test_A12_one_that_comes_while_a_victim_is_slow_gets_its_own_victim() -> None:
    cluster = cluster_of("n1", "n2")
    cluster.run(*(submitted(f"low{n}", **LOW) for n in range(2)))
    cluster.tell(submitted("p0"))
    cluster.later(5_000)
    cluster.tell(submitted("p1"))
    assert sorted(cluster.preempted()) == ["low0", "low1"]
    cluster.stopped("low0")
    assert len(cluster.preempted()) == 2


def test_gpus_kept_for_a_gang_go_to_whoever_could_take_them_from_it_if_it_ran() -> None:
    cluster = cluster_of("n1", "n2")
    cluster.run(submitted("running", priority_class="CRITICAL"))
    cluster.tell(submitted("gang", nodes=2))
    assert cluster.codes("gang") == ["reserved"]
    cluster.tell(submitted("equal"))
    assert cluster.codes("equal") == ["kept_for_others"]
    assert planned(cluster, submitted("new", priority_class="CRITICAL")).nodes == ("n2",)
    cluster.tell(submitted("higher", priority_class="CRITICAL"))
    assert cluster.places("higher") == ("n2",)
    cluster.start("running")
    cluster.end("running")
    assert cluster.places("gang") == cluster.places("equal") == ()
    cluster.start("higher")
    cluster.end("higher")
    assert cluster.places("gang") == ("n1", "n2"), "it is still before its equals"


def test_an_owner_gets_gpus_kept_for_a_borrower_before_anybody_is_preempted_for_it() -> None:
    cluster = cluster_of(
        "n1",
        gpus=8,
        queues=[
            {"name": "owner", "gpus": {"nominal": 5}},
            {"name": "borrower", "gpus": {"nominal": 3}},
            {"name": "third", "gpus": {"nominal": 0}},
        ],
    )
    cluster.run(submitted("t", per_node=1, queue="third"))
    cluster.run(*(submitted(f"o{n}", per_node=1, queue="owner") for n in range(4)))
    cluster.tell(submitted("big", per_node=4, queue="borrower"))
    assert cluster.codes("big") == ["reserved", "above_nominal"]
    cluster.tell(submitted("o4", per_node=1, queue="owner"))
    assert (cluster.places("o4"), cluster.preempted()) == (("n1",), [])


def test_a_higher_gang_takes_over_what_is_kept_for_a_lower_one() -> None:
    cluster = cluster_of("n1", "n2", "n3")
    for job_id in ("r1", "r2"):
        cluster.run(submitted(job_id, priority_class="CRITICAL", limits={"timeout_minutes": 10}))
    cluster.tell(submitted("low", nodes=3))
    assert set(cluster.state.claims) == {"low"}
    cluster.tell(submitted("high", nodes=2, priority_class="CRITICAL"))
    assert set(cluster.state.claims) == {"high"}, "two of the three nodes; one is too few for the other gang"
    cluster.end("r1")
    assert cluster.places("high") != ()
    assert cluster.places("low") == ()
