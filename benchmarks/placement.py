"""How much of a cluster gets allocated: ours beside random, first fit and best fit, on files of the openb format.

The protocol of the FGD paper (Weng et al., ATC 2023): the pods of a list arrive in random order, then random ones of
them again until the demand is so many percent of the cluster's GPUs, and none ever ends. The reading at P percent is
the last one before P+1 percent have arrived, so P+1 is the most that it can be. Nodes join in random order too.

Ours is measured twice: knowing of the mix what arrived so far, as the scheduler does, and, as FGD, the whole list.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker_scheduler.fragments import WHOLE, Mix
from stoker_scheduler.placement import Capacity, Demand, Spot, choose, fitting
from stoker_scheduler.popular import Popular

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
OURS, PRIMED = "stoker", "stoker, whole list known"


class BadFile(Exception):
    """What is wrong with a file, in one line."""


class Node(NamedTuple):
    name: str
    models: tuple[str, ...]
    cpu: int
    memory: int


class Pod(NamedTuple):
    name: str
    demand: Demand

    @property
    def milli(self) -> int:
        return self.demand.gpus * self.demand.milli


class Stream(NamedTuple):
    """One seed's nodes and arrivals."""

    nodes: list[Node]
    pods: list[Pod]
    total: int  # milli-GPU of the cluster


def rows(file: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise BadFile(f"{file}: no column {', '.join(missing)}; the first line must name them")
            found = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadFile(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if not found:
        raise BadFile(f"{file}: no rows")
    return found


def number(file: Path, line: int, row: dict[str, str], column: str, least: int = 0, most: int = 2**31) -> int:
    text = row[column] or ""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise BadFile(f"{file}, line {line}: {column} is {text!r}, not a whole number from {least} to {most}")
    return int(text)


def read_nodes(file: Path) -> list[Node]:
    nodes = []
    for line, row in rows(file, NODE_COLUMNS):
        cpu, memory, gpus = (number(file, line, row, c) for c in ("cpu_milli", "memory_mib", "gpu"))
        nodes.append(Node(row["sn"], (row["model"],) * gpus, cpu, memory))
    twice = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    if twice:
        raise BadFile(f"{file}: {twice[0]} is there twice")
    if not any(node.models for node in nodes):
        raise BadFile(f"{file}: no GPUs")
    return nodes


def read_pods(file: Path, whole: bool) -> list[Pod]:
    """With `whole`, shares are rounded up to GPUs and pods without GPU are left out."""
    pods = []
    for line, row in rows(file, POD_COLUMNS):
        cpu, memory, gpus = (number(file, line, row, c) for c in ("cpu_milli", "memory_mib", "num_gpu"))
        milli = number(file, line, row, "gpu_milli", 1, WHOLE) if gpus else 0
        if whole and not gpus:
            continue
        models = tuple(sorted({model for model in (row.get("gpu_spec") or "").split("|") if model}))
        pods.append(Pod(row["name"], Demand(gpus, WHOLE if whole else milli, cpu, memory, models)))
    if not any(pod.milli for pod in pods):
        raise BadFile(f"{file}: nobody asks for GPUs")
    return pods


def stream(nodes: list[Node], pods: list[Pod], percent: int, seed: int) -> Stream:
    drawn = random.Random(seed)
    total = WHOLE * sum(len(node.models) for node in nodes)
    shuffled, order = drawn.sample(nodes, len(nodes)), drawn.sample(pods, len(pods))
    arrivals: list[Pod] = []
    arrived = 0
    while arrived * 100 < percent * total:
        pod = order[len(arrivals)] if len(arrivals) < len(order) else drawn.choice(pods)
        arrivals.append(pod)
        arrived += pod.milli
    return Stream(shuffled, arrivals, total)


class Cluster:
    """Free capacity, in ours and, for the reference policies, in plain arrays."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.capacity = Capacity()
        for node in nodes:
            self.capacity.join(node.name, node.models, node.cpu, node.memory)
        self.usable = np.ones(len(nodes), dtype=np.bool_)
        self.idle = np.array([WHOLE * len(node.models) for node in nodes])
        self.cpu = np.array([node.cpu for node in nodes])

    def take(self, demand: Demand, spot: Spot) -> None:
        row, gpus = spot
        self.capacity.take(self.capacity.names[row], gpus, demand.milli, demand.cpu, demand.memory)
        self.idle[row] -= demand.gpus * demand.milli
        self.cpu[row] -= demand.cpu

    def give(self, demand: Demand, spot: Spot) -> None:
        row, gpus = spot
        self.capacity.give(self.capacity.names[row], gpus, demand.milli, demand.cpu, demand.memory)
        self.idle[row] += demand.gpus * demand.milli
        self.cpu[row] += demand.cpu


Policy = Callable[[Cluster, Demand], Spot | None]


def ours() -> Policy:
    popular = Popular()

    def place(cluster: Cluster, demand: Demand) -> Spot | None:
        popular.add(demand.shape, demand.nodes)
        return choose(cluster.capacity, demand, cluster.usable, popular.mix)

    return place


def primed(pods: Sequence[Pod]) -> Policy:
    mix = Mix.of(Counter(pod.demand.shape for pod in pods))
    return lambda cluster, demand: choose(cluster.capacity, demand, cluster.usable, mix)


def reference(pick: Callable[[Cluster, Demand, np.ndarray], int]) -> Policy:
    """One of those nodes that fit; on the node, the most used GPUs that will do."""

    def place(cluster: Cluster, demand: Demand) -> Spot | None:
        fits = fitting(cluster.capacity, demand, cluster.usable).nonzero()[0]
        if not fits.size:
            return None
        row = pick(cluster, demand, fits)
        return row, cluster.capacity.pick(demand, row)

    return place


def best_fit(cluster: Cluster, demand: Demand, fits: np.ndarray) -> int:
    """As in the paper: half the free GPU in units of 8, half the free CPU in units of 128 cores."""
    return int(fits[(cluster.idle[fits] / 8000 + cluster.cpu[fits] / 128_000).argmin()])


def policies(pods: Sequence[Pod], seed: int) -> dict[str, Policy]:
    drawn = random.Random(seed)
    return {
        OURS: ours(),
        PRIMED: primed(pods),
        "random": reference(lambda _cluster, _demand, fits: int(drawn.choice(fits))),
        "first fit": reference(lambda _cluster, _demand, fits: int(fits[0])),
        "best fit": reference(best_fit),
    }


class Outcome(NamedTuple):
    allocated: dict[int, float]  # percent of the GPUs, by percent arrived
    unplaced_8gpu: int
    late_8gpu: int  # pods of 8 GPUs that arrived when as many GPUs had been asked for as there are
    seconds: float  # of CPU time, for each arrival
    placements: str


def play(given: Stream, place: Policy, percents: Sequence[int], rebuild_every: int | None = None) -> Outcome:
    cluster, placed, readings = Cluster(given.nodes), list[tuple[Pod, Spot]](), dict.fromkeys(percents, 0.0)
    lines, allocated, arrived, unplaced, late = [], 0, 0, 0, 0
    seconds = 0.0
    for at, pod in enumerate(given.pods):
        if rebuild_every and at and at % rebuild_every == 0:
            cluster = rebuilt(given.nodes, placed)
        began = time.thread_time()
        spot = place(cluster, pod.demand)
        if spot is not None:
            cluster.take(pod.demand, spot)
        seconds += time.thread_time() - began
        late += pod.demand.gpus == 8 and arrived >= given.total
        arrived += pod.milli
        if spot is None:
            unplaced += pod.demand.gpus == 8
        else:
            allocated += pod.milli
            placed.append((pod, spot))
        lines.append(f"{at} {pod.name} {'-' if spot is None else (given.nodes[spot[0]].name, *spot[1])}\n")
        for percent in percents:
            if arrived * 100 < (percent + 1) * given.total:
                readings[percent] = 100 * allocated / given.total
    return Outcome(readings, unplaced, late, seconds / len(given.pods), "".join(lines))


def rebuilt(nodes: Sequence[Node], placed: Sequence[tuple[Pod, Spot]]) -> Cluster:
    """From nothing, with a detour."""
    cluster = Cluster(nodes)
    for pod, spot in placed:
        cluster.take(pod.demand, spot)
    for pod, spot in placed:
        cluster.give(pod.demand, spot)
        cluster.take(pod.demand, spot)
    return cluster


def figures(outcomes: Sequence[Outcome], percents: Sequence[int]) -> dict[str, float | str]:
    """Means over the seeds."""
    means: dict[str, float | str] = {}
    for percent in percents:
        means[f"allocated_pct_{percent}"] = round(statistics.mean(o.allocated[percent] for o in outcomes), 3)
    spread = [outcome.allocated[percents[-1]] for outcome in outcomes]
    means[f"allocated_pct_{percents[-1]}_sd"] = round(statistics.stdev(spread), 3) if len(spread) > 1 else 0.0
    means["unplaced_8gpu"] = round(statistics.mean(o.unplaced_8gpu for o in outcomes), 2)
    means["late_8gpu"] = round(statistics.mean(o.late_8gpu for o in outcomes), 2)
    means["seconds_per_placement"] = round(statistics.mean(o.seconds for o in outcomes), 6)
    means["sha256"] = hashlib.sha256("".join(o.placements for o in outcomes).encode()).hexdigest()
    return means


def table(found: Mapping[str, Mapping[str, float | str]], percents: Sequence[int]) -> None:
    columns = [f"{percent} %" for percent in percents]
    print(f"{'allocated at':24}", *(f"{c:>7}" for c in (*columns, "late", "missed", "ms/pod")))
    for name, means in found.items():
        print(f"{name:24}", *(f"{means[f'allocated_pct_{percent}']:7.2f}" for percent in percents), end=" ")
        milliseconds = 1000 * float(means["seconds_per_placement"])
        print(f"{means['late_8gpu']:7.1f} {means['unplaced_8gpu']:7.1f} {milliseconds:7.3f}")
    print("missed: 8-GPU pods that got no place; late: those that came when all GPUs had been asked for")


def measure(nodes: list[Node], pods: list[Pod], seeds: Sequence[int], percents: Sequence[int]) -> dict[str, object]:
    outcomes: dict[str, list[Outcome]] = {}
    for seed in seeds:
        given = stream(nodes, pods, percents[-1], seed)
        for name, policy in policies(pods, seed).items():
            outcomes.setdefault(name, []).append(play(given, policy, percents))
    given, first = stream(nodes, pods, percents[-1], seeds[0]), outcomes[OURS][0].placements
    found = {name: figures(of_policy, percents) for name, of_policy in outcomes.items()}
    table(found, percents)
    own = found.pop(OURS)
    return {
        "seeds": f"{seeds[0]}-{seeds[-1]}",
        **own,
        "same_twice": play(given, ours(), percents).placements == first,
        "same_rebuilt": play(given, ours(), percents, rebuild_every=1000).placements == first,
        **{name.replace(", ", "_").replace(" ", "_"): means for name, means in found.items()},
    }


def percents_of(text: str) -> list[int]:
    values = sorted({int(part) for part in text.split(",")})
    if not 1 <= values[0] <= values[-1] <= 1000:
        raise ValueError(text)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=Path, required=True, help=f"CSV with {', '.join(NODE_COLUMNS)}")
    parser.add_argument("--pods", type=Path, required=True, help=f"CSV with {', '.join(POD_COLUMNS)}; gpu_spec if any")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--whole-gpu", action="store_true", help="round shares up to whole GPUs, drop pods without GPU")
    parser.add_argument("--percent", type=percents_of, default=[80, 95, 100, 130], metavar="P,P,...", help="readings")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    try:
        nodes, pods = read_nodes(arguments.nodes), read_pods(arguments.pods, arguments.whole_gpu)
    except BadFile as bad:
        print(bad, file=sys.stderr)
        sys.exit(2)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    print(json.dumps(measure(nodes, pods, seeds, arguments.percent)))


if __name__ == "__main__":
    main()
