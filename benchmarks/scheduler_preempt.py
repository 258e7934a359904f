"""Jobs that give way for each job that takes their place, beside the fewest that would do, found by trying all.

`ratio` is over random full clusters, each with one job of a higher class that wants a random gang. `wasted` is the GPU
time lost by those who gave way, beside the least that any choice of as many jobs would have lost. Then a cluster is
contended for: jobs of the higher class come one after the other, and whoever gave way comes back and may have to again.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random
from typing import Any

from tests.builders import submitted
from tests.unit.scheduler_cluster import Cluster
from tests.unit.test_scheduler_scenarios_a import LOW, cluster_of
from tests.unit.test_scheduler_victims import crowded, fewest

from stoker_proto import CancelRequested
from stoker_scheduler.eligible import lost_by

NODES, GPUS = 4, 8


def losses(cluster: Cluster) -> dict[str, int]:
    """What each job that may be preempted would lose now."""
    found = {}
    for job_id in cluster.state.active:
        job = cluster.job(job_id)
        if job.attempt is not None and job.class_name == "BEST_EFFORT" and job.attempt.stop is None:
            found[job_id] = lost_by(job.attempt, cluster.log.at_ms)
    return found


def least_lost(cluster: Cluster, gpus: int, nodes: int, per_node: int, size: int) -> int:
    """The least that so many jobs lose that make room for so many nodes with so many free GPUs, by trying all."""
    held = {
        job_id: [(part.allocation.node, len(part.allocation.gpus)) for part in cluster.attempt(job_id).parts]
        for job_id in cluster.state.active
    }
    lost = losses(cluster)
    best: int | None = None
    for gone in combinations(lost, size):
        used = Counter(dict.fromkeys(cluster.state.nodes, 0))
        for job_id in held.keys() - set(gone):
            used.update(dict(held[job_id]))
        if sum(gpus - count >= per_node for count in used.values()) >= nodes:
            cost = sum(lost[job_id] for job_id in gone)
            best = cost if best is None else min(best, cost)
    assert best is not None, "the scheduler found one"
    return best


def contended(seed: int) -> tuple[int, int]:
    """How often one job gave way at most, and how many jobs of the higher class started of those that came."""
    chance = Random(seed)
    cluster = cluster_of(*(f"n{at}" for at in range(NODES)), gpus=GPUS, scheduling={"max_preemptions": 3})
    for number in range(40):
        job_id = f"low{number}"
        cluster.tell(submitted(job_id, per_node=chance.choice([1, 1, 2, 4, 8]), **LOW))
        if cluster.places(job_id):
            cluster.start(job_id)
        else:
            cluster.tell(CancelRequested(job_id=job_id))
    started = 0
    for at in range(20):
        name, nodes = f"high{at}", chance.choice([1, 1, 2])
        cluster.log.at_ms += 60_000
        cluster.tell(submitted(name, nodes=nodes, per_node=chance.choice([1, 2, 4, 8])))
        for job_id in list(cluster.state.active):
            if cluster.attempt(job_id).stop is not None:
                cluster.stopped(job_id)
        for job_id in list(cluster.state.active):
            if cluster.attempt(job_id).running_ms is None:
                cluster.start(job_id)
        if cluster.places(name):
            started += 1
            cluster.end(name)
        for job_id in list(cluster.state.active):
            if cluster.attempt(job_id).running_ms is None:
                cluster.start(job_id)
    return max(Counter(cluster.preempted()).values(), default=0), started


def measure(seeds: int = 300, contentions: int = 10) -> dict[str, Any]:
    stopped = needed = satisfied = in_vain = wasted = least_wasted = compared = 0
    for seed in range(seeds):
        chance = Random(seed)
        cluster, gpus = crowded(chance)
        nodes, per_node = chance.randint(1, len(cluster.state.nodes)), chance.randint(1, gpus)
        if cluster.preempted():
            continue
        cluster.log.at_ms += 60_000
        least = fewest(cluster, gpus, nodes, per_node)
        lost = losses(cluster)
        before = {size: least_lost(cluster, gpus, nodes, per_node, size) for size in ([least] if least else [])}
        cluster.tell(submitted("p", nodes=nodes, per_node=per_node))
        gone = cluster.preempted()
        if least is None:
            in_vain += len(gone)
        elif gone:
            stopped, needed, satisfied = stopped + len(gone), needed + least, satisfied + 1
            if len(gone) == least:
                compared += 1
                wasted, least_wasted = wasted + sum(lost[job_id] for job_id in gone), least_wasted + before[least]
    contests = [contended(seed) for seed in range(contentions)]
    return {
        "preemptors": satisfied, "stopped": stopped, "fewest": needed, "ratio": round(stopped / max(1, needed), 3),
        "stopped_in_vain": in_vain, "compared": compared, "wasted_gpu_s": wasted // 1_000_000,
        "least_gpu_s": least_wasted // 1_000_000, "wasted_ratio": round(wasted / max(1, least_wasted), 3),
        "contenders_started": sum(started for _, started in contests), "contenders": 20 * contentions,
        "most_of_one_job": max(most for most, _ in contests),
    }  # fmt: skip
