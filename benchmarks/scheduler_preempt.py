"""Jobs that give way for each job that takes their place, beside the fewest that would do, found by trying all."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.builders import submitted
from tests.unit.test_scheduler_victims import crowded, fewest


def measure(seeds: int = 300) -> dict[str, Any]:
    """Random full clusters, each with one job of a higher class that wants a random gang."""
    stopped = needed = satisfied = in_vain = 0
    for seed in range(seeds):
        chance = Random(seed)
        cluster, gpus = crowded(chance)
        nodes, per_node = chance.randint(1, len(cluster.state.nodes)), chance.randint(1, gpus)
        if cluster.preempted():
            continue
        least = fewest(cluster, gpus, nodes, per_node)
        cluster.tell(submitted("p", nodes=nodes, per_node=per_node))
        found = len(cluster.preempted())
        if least is None:
            in_vain += found
        elif found:
            stopped, needed, satisfied = stopped + found, needed + least, satisfied + 1
    return {
        "preemptors": satisfied, "stopped": stopped, "fewest": needed, "ratio": round(stopped / max(1, needed), 3),
        "stopped_in_vain": in_vain,
    }  # fmt: skip
