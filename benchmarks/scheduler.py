"""How fast the scheduler decides: one pass over a huge cluster, jobs started per second, and what history costs.

`pass`     a full pass at 4,000 nodes of 8 GPUs, all of them held, and 100,000 jobs waiting in 200 shapes, 30 queues and
           3 classes, each shape in one queue and class
`spread`   the same with every shape in every queue and class: some 18,000 lanes
`starts`   jobs started per second through the real log and the real service (see `scheduler_starts`)
`history`  fold and decide with a million finished jobs behind, beside the same with none (see `scheduler_history`)
`preempt`  preemptions per satisfied preemptor, beside the fewest that would do (see `scheduler_preempt`)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from stoker_chassis.hosting import relax_collector
from stoker_proto import Cluster, ClusterConfigured, JobSpec

from . import scheduler_history, scheduler_preempt, scheduler_starts
from .scheduler_world import World, job_spec

QUEUES = tuple(f"q{i:02d}" for i in range(30))
CLASSES = ("BEST_EFFORT", "NORMAL", "CRITICAL")
MODELS = ("H100", "A100")
PASS_MS = 1_000


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def quantile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))], 4)


def shared(gpus: int) -> Cluster:
    """Thirty queues with equal guarantees, which together are all GPUs; each may hold three times as much."""
    share = gpus // len(QUEUES)
    quota = {"nominal": share, "limit": 3 * share, "lend": share // 2}
    return Cluster.model_validate({"queues": [{"name": name, "gpus": quota} for name in QUEUES]})


def shapes(count: int) -> list[dict[str, Any]]:
    """Different demands, as many as that: GPUs, nodes, models, cores and memory."""
    found: list[dict[str, Any]] = []
    for cores in range(0, 96, 4):
        for model in ("ANY", *MODELS):
            for gpus, nodes in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16)):
                found.append({"gpus": gpus, "nodes": nodes, "model": model, "cpus_per_node": cores * gpus / 8})
    return found[:count]


def one_pass(nodes: int, waiting: int, kinds: int, passes: int, *, spread: bool) -> dict[str, Any]:
    """Each pass finds a few nodes that have just become free; what it decides then lands and comes true."""
    world, rng = World(), random.Random(1)
    world.fold(ClusterConfigured(version=1, cluster=shared(8 * nodes)))
    names = [f"node-{i:05d}" for i in range(nodes)]
    for i, name in enumerate(names):
        world.join(name, MODELS[i // 16 % 2], rack=f"rack-{i // 16}")
    running = [
        job_spec(gpus, count, minutes=rng.choice((None, 300, 6000)), queue=rng.choice(QUEUES), priority_class=kind)
        for gpus, count in ((1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
        for kind in CLASSES
        for _ in range(30)
    ]
    world.fill(names, rng, running)
    world.at_ms += 3_600_000
    made: dict[tuple[int, str, str], JobSpec] = {}
    demands = shapes(kinds)
    for i in range(waiting):
        at = rng.randrange(len(demands))
        key = (at, QUEUES[at % len(QUEUES)], CLASSES[at % len(CLASSES)])
        if spread:
            key = (at, rng.choice(QUEUES), rng.choice(CLASSES))
        if key not in made:
            made[key] = job_spec(**demands[key[0]], minutes=240, queue=key[1], priority_class=key[2])
        world.submit(f"wait-{i:06d}", made[key])
    lanes = sum(len(found) for found in world.state.waiting.queues.values())
    say(f"{len(world.state.active)} jobs run, {len(world.state.waiting)} wait in {lanes} lanes")
    relax_collector()
    gc.collect()
    gc.freeze()
    spent: list[float] = []
    cpu: list[float] = []
    placed = stopped = events = 0
    folding = 0.0
    for at in range(passes + 1):
        world.at_ms += PASS_MS
        began, before = time.process_time(), world.events
        for name in rng.sample(names, 4):
            for job_id in sorted(world.state.holders(name)):
                world.end(job_id)
        for job_id in world.stopping():
            world.end(job_id)
        folding += time.process_time() - began
        began, cpu_began = time.perf_counter(), time.process_time()
        done = world.scheduler.cycle(world.at_ms).out
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        began = time.process_time()
        world.land(done.actions)
        folding += time.process_time() - began
        events += world.events - before
        told = [action.action for action in done.actions]
        say(f"pass {at}: {seconds:.3f} s ({cpu_seconds:.3f} of CPU), { {k: told.count(k) for k in sorted(set(told))} }")
        if at:  # the first one learns the layout
            spent.append(seconds)
            cpu.append(cpu_seconds)
            placed, stopped = placed + told.count("place"), stopped + told.count("stop")
    return {
        "nodes": nodes, "running": len(world.state.active), "waiting": len(world.state.waiting), "lanes": lanes,
        "passes": passes, "p50_s": quantile(spent, 0.5), "p95_s": quantile(spent, 0.95),
        "cpu_p50_s": quantile(cpu, 0.5), "cpu_p95_s": quantile(cpu, 0.95), "placed": placed,
        "stopped": stopped, "fold_us_per_event": round(folding / events * 1e6, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="pass,spread,starts,history,preempt")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4_000)
    parser.add_argument("--waiting", type=int, default=100_000)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    told: dict[str, Any] = {}
    if "pass" in wanted:
        told["pass"] = one_pass(arguments.nodes, arguments.waiting, 200, arguments.passes, spread=False)
    if "spread" in wanted:
        told["spread"] = one_pass(arguments.nodes, arguments.waiting, 200, arguments.passes, spread=True)
    if "starts" in wanted:
        told["starts"] = asyncio.run(scheduler_starts.measure(640, 15_000))
    if "history" in wanted:
        # In a process of its own: what the others leave in memory would count as history.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            told["history"] = pool.submit(scheduler_history.measure).result()
    if "preempt" in wanted:
        told["preempt"] = scheduler_preempt.measure()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
