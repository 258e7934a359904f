"""Waiting times on a trace of gangs: the scheduler against first come first served, EASY backfill and skipping.

One queue and one class, so nobody is preempted. `known` gives every job its true duration as its time limit; with
`unknown` nobody knows when anything ends, while the plain orders, as far as they look at durations, always do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.queue_baselines import Ask, Order, waits
from stoker_proto import AttemptPlaced, Cluster, PriorityClass
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.simulation.traces import read_trace
from stoker_scheduler.simulation.workload import (
    MS_IN_MINUTE,
    START_MS,
    Work,
    Workload,
    alike,
    configured,
    joining,
    with_limits,
    without_limits,
)
from stoker_scheduler.simulation.world import Options, Trial, Witness, World

SIZE = 8
BIG = 16  # GPUs: a gang that small jobs could keep waiting for ever
PLAIN: tuple[Order, ...] = ("fifo", "easy", "easy_deep", "skip")
# Minutes on philly_derived_mix1, 144 nodes. The mean that EASY and FIFO reach, and the longest wait of a big gang
# under FIFO, in an earlier and independent replay.
BARS = {"known_mean": 389.0, "known_big_max": 1950.0, "unknown_mean": 712.0}
MEASURED = {"known_mean": "known_144_mean", "known_big_max": "known_144_big_max", "unknown_mean": "unknown_144_mean"}


class Figures(NamedTuple):
    """Minutes."""

    mean: float
    p50: float
    p99: float
    longest: float
    big_mean: float
    big_max: float
    slowdown: float


class Starts(Witness):
    """When each job first started."""

    def __init__(self) -> None:
        self.at_ms: dict[str, int] = {}

    def placed(self, at_ms: int, trial: Trial, placed: AttemptPlaced) -> None:
        if self.at_ms.setdefault(trial.work.job_id, at_ms) != at_ms:
            raise RuntimeError(f"{trial.work.job_id} was placed twice, although nothing is preempted")


def figures(works: list[Work], waited: list[float]) -> Figures:
    ordered = sorted(waited)
    big = [wait for work, wait in zip(works, waited, strict=True) if work.spec.compute.num_accelerators >= BIG]
    slow = [(wait + _minutes(work)) / _minutes(work) for work, wait in zip(works, waited, strict=True)]
    return Figures(
        mean=round(statistics.fmean(waited), 1),
        p50=ordered[len(ordered) // 2],
        p99=ordered[len(ordered) * 99 // 100],
        longest=ordered[-1],
        big_mean=round(statistics.fmean(big), 1) if big else 0.0,
        big_max=max(big, default=0.0),
        slowdown=round(statistics.fmean(slow), 2),
    )


def _minutes(work: Work) -> float:
    return work.duration_ms / MS_IN_MINUTE


def plain(works: list[Work], nodes: int, order: Order) -> Figures:
    asks = [
        Ask(
            (work.at_ms - START_MS) // MS_IN_MINUTE,
            work.spec.compute.num_accelerators,
            work.duration_ms // MS_IN_MINUTE,
        )
        for work in works
    ]
    return figures(works, [float(wait) for wait in waits(asks, nodes, SIZE, order)])


def ours(works: list[Work], nodes: int, cluster: Cluster) -> Figures:
    starts = Starts()
    happenings = (configured(cluster, START_MS), *joining(alike(nodes, SIZE, "SIM"), START_MS))
    world = World(
        Scheduler(Timing(), tells=False), Workload(tuple(works)).plus(happenings), Options(checkpoint_ms=0), starts
    )
    world.play()
    return figures(works, [(starts.at_ms[work.job_id] - work.at_ms) / MS_IN_MINUTE for work in works])


def one_class(scheduling: dict[str, object]) -> Cluster:
    return Cluster.model_validate({"classes": [PriorityClass(name="NORMAL", value=100)], "scheduling": scheduling})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="philly_derived_mix1.csv")
    parser.add_argument("--nodes", default="144", help="of 8 GPUs; several with commas")
    parser.add_argument("--durations", default="known,unknown")
    parser.add_argument("--scheduling", type=json.loads, default={}, help="numbers in place of the defaults, as JSON")
    asked = parser.parse_args()
    cluster = one_class(asked.scheduling)
    workload = read_trace(asked.trace, cluster, SIZE)
    print("\n".join(workload.notes), file=sys.stderr)
    # Of one minute the shortest comes first, for all alike: the order in which the bars were measured.
    works = sorted(workload.works, key=lambda work: (work.at_ms, work.duration_ms))
    told: dict[str, float] = {"jobs": len(works)}
    for nodes in map(int, asked.nodes.split(",")):
        table = Table(title=f"{len(works)} jobs on {nodes} nodes of {SIZE} GPUs: waiting time in minutes")
        for column in ("", "mean", "p50", "p99", "max", f"mean {BIG}+ GPUs", f"max {BIG}+ GPUs", "slowdown", "CPU s"):
            table.add_column(column, justify="right" if column else "left")
        limits = {"known": with_limits, "unknown": without_limits}
        for name in (*PLAIN, *asked.durations.split(",")):
            began = time.process_time()
            if name in limits:
                found, name = ours([limits[name](work) for work in works], nodes, cluster), f"stoker_{name}"
            else:
                found = plain(works, nodes, name)
            seconds = time.process_time() - began
            table.add_row(name, *(f"{value:g}" for value in found), f"{seconds:.1f}")
            told |= {f"{name}_{nodes}_{figure}": value for figure, value in found._asdict().items()}
            told[f"{name}_{nodes}_cpu_s"] = round(seconds, 1)
        Console(width=120).print(table)
    met = {name: told[f"stoker_{key}"] < BARS[name] for name, key in MEASURED.items() if f"stoker_{key}" in told}
    print(json.dumps(told | {"bars": BARS, "bars_met": met}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
