"""Whom to stop: as few as can be, those that lose least, and nobody when it would not help."""

from __future__ import annotations

from itertools import combinations
from random import Random

from stoker_proto import CancelRequested, CheckpointSaved, NodeQuarantined
from tests.builders import exited, released, submitted
from tests.unit.scheduler_cluster import Cluster
from tests.unit.test_scheduler_scenarios_a import LOW, MINUTE, cluster_of

Held = dict[str, list[tuple[str, int]]]


def crowded(chance: Random) -> tuple[Cluster, int]:
    """A cluster full of running jobs of one and of two nodes, some of which may not be preempted; GPUs a node has."""
    nodes, gpus = chance.randint(2, 4), chance.choice([2, 4])
    cluster = cluster_of(*(f"n{number}" for number in range(nodes)), gpus=gpus)
    for number in range(chance.randint(3, 9)):
        job_id, kind = f"j{number}", chance.choice(["BEST_EFFORT", "BEST_EFFORT", "BEST_EFFORT", "CRITICAL"])
        size = chance.choice([1, 1, 1, 2])
        cluster.tell(submitted(job_id, nodes=size, per_node=chance.randint(1, gpus), priority_class=kind))
        cluster.log.at_ms += 1_000
        if cluster.places(job_id):
            cluster.start(job_id)
        else:
            cluster.tell(CancelRequested(job_id=job_id))
    return cluster, gpus


def fewest(cluster: Cluster, gpus: int, nodes: int, per_node: int) -> int | None:
    """How many jobs must go at least for so many nodes to have so many free GPUs, by trying all of it."""
    held: Held = {
        job_id: [(p.allocation.node, len(p.allocation.gpus)) for p in cluster.attempt(job_id).parts]
        for job_id in cluster.state.active
    }
    low = [job_id for job_id in held if cluster.job(job_id).class_name == "BEST_EFFORT"]
    for size in range(len(low) + 1):
        for gone in combinations(low, size):
            used = dict.fromkeys(cluster.state.nodes, 0)
            for job_id in held.keys() - set(gone):
                for node, count in held[job_id]:
                    used[node] += count
            if sum(gpus - count >= per_node for count in used.values()) >= nodes:
                return size
    return None


def test_hardly_ever_does_one_more_job_give_way_than_must_and_never_one_in_vain() -> None:
    stopped = needed = 0
    for seed in range(100):
        chance = Random(seed)
        cluster, gpus = crowded(chance)
        nodes, per_node = chance.randint(1, len(cluster.state.nodes)), chance.randint(1, gpus)
        if cluster.preempted():
            continue
        least = fewest(cluster, gpus, nodes, per_node)
        cluster.tell(submitted("p", nodes=nodes, per_node=per_node))
        found = len(cluster.preempted())
        assert (found > 0) == bool(least), f"seed {seed}: {found} of {least}"
        stopped, needed = stopped + found, needed + (least or 0)
        for victim in cluster.preempted():
            cluster.stopped(victim)
        assert bool(cluster.places("p")) == (least is not None), f"seed {seed}: it starts once they are gone"
    assert needed > 40
    assert stopped <= 1.05 * needed, f"{stopped} jobs gave way where {needed} must"


def test_what_a_preemption_wastes_is_counted_from_the_last_durable_checkpoint() -> None:
    cluster = cluster_of("n1", "n2")
    cluster.run(submitted("saved", **LOW), submitted("unsaved", **LOW))
    cluster.later(10 * MINUTE)
    cluster.tell(CheckpointSaved(job_id="saved", attempt=1, step=1, path="p", bytes=1))
    cluster.tell(submitted("p"))
    assert cluster.preempted() == ["saved"]


def test_when_the_node_of_a_victim_breaks_another_gives_way_and_no_third() -> None:
    cluster = cluster_of("n1", "n2")
    cluster.run(submitted("low0", **LOW), submitted("low1", **LOW))
    cluster.tell(submitted("p"))
    (first,) = cluster.preempted()
    node = cluster.places(first)[0]
    cluster.tell(NodeQuarantined(node=node, boot_epoch="b1", rule="xid", reason="XID 79"))
    assert len(cluster.preempted()) == 2, "its claim is dead with the node, so another must give way"
    attempt = cluster.attempt(first)
    cluster.tell(exited(first, 1, node, attempt.fence, "cancelled", asked="preempted"))
    cluster.tell(released(first, 1, node, attempt.fence))
    cluster.later(10 * MINUTE)
    assert len(cluster.preempted()) == 2


def test_a_gang_for_which_gpus_are_kept_takes_victims_as_soon_as_it_may() -> None:
    cluster = cluster_of("n1", scheduling={"min_run_minutes": 5})
    cluster.run(submitted("low", limits={"timeout_minutes": 600}, **LOW))
    cluster.tell(submitted("high"))
    assert (cluster.codes("high"), cluster.preempted()) == (["reserved"], [])
    assert cluster.scheduler.due_ms(cluster.log.at_ms) == cluster.log.at_ms + 5 * MINUTE
    cluster.later(5 * MINUTE - 1)
    assert cluster.preempted() == []
    cluster.later(1)
    assert (cluster.codes("high"), cluster.preempted()) == (["draining"], ["low"])
    cluster.stopped("low")
    assert cluster.places("high") == ("n1",)


def test_what_is_kept_for_a_job_that_its_queue_may_not_start_any_more_goes_to_others() -> None:
    cluster = cluster_of("n1", queues=[{"name": "a"}, {"name": "b"}])
    cluster.run(submitted("low", queue="a", **LOW))
    cluster.tell(submitted("high", queue="a"))
    cluster.configure(queues=[{"name": "a", "gpus": {"limit": 1}}, {"name": "b"}])
    assert set(cluster.state.claims) == {"high"}, "what it waits for is still on its way"
    cluster.tell(submitted("other", per_node=1, queue="b"))
    cluster.stopped("low")
    assert cluster.codes("high")[0] == "queue_limit"
    assert (cluster.state.claims, cluster.places("other")) == ({}, ("n1",))


def test_what_is_kept_for_a_job_goes_to_others_when_its_queue_is_gone() -> None:
    cluster = cluster_of("n1", queues=[{"name": "a"}, {"name": "b"}])
    cluster.run(submitted("low", queue="b", **LOW))
    cluster.tell(submitted("high", queue="b"))
    cluster.tell(submitted("other", queue="a"))
    assert set(cluster.state.claims) == {"high"}
    cluster.configure(queues=[{"name": "a"}])
    assert "high" not in cluster.state.claims
    cluster.stopped("low")
    assert cluster.places("other") == ("n1",)


def test_gpus_are_not_kept_on_a_node_whose_cores_nobody_will_give_back() -> None:
    cluster = cluster_of("n1", "n2", gpus=4)
    cluster.run(submitted("endless", per_node=1, cpus_per_node=4))
    cluster.run(submitted("short", per_node=4, limits={"timeout_minutes": 10}))
    assert (len(cluster.places("endless")), len(cluster.places("short"))) == (1, 1)
    cluster.tell(submitted("waits", per_node=3, cpus_per_node=2))
    assert [a.node for a in cluster.state.claims["waits"].allocations] == list(cluster.places("short"))
    cluster.tell(submitted("small", per_node=2))
    assert cluster.places("small") == cluster.places("endless")


def test_only_so_many_jobs_give_way_in_a_minute() -> None:
    cluster = cluster_of("n1", "n2", scheduling={"preemptions_per_minute": 1})
    cluster.run(submitted("low0", **LOW), submitted("low1", **LOW))
    cluster.tell(submitted("p0"), submitted("p1"))
    assert len(cluster.preempted()) == 1
    cluster.later(MINUTE - 1)
    assert len(cluster.preempted()) == 1, "a whole minute must have passed"
    cluster.later(1)
    assert len(cluster.preempted()) == 2
