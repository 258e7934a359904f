"""What a long history costs: jobs started per second with a million finished jobs behind, beside the same with none.

Fold and decide alone, without the log: each job is submitted, placed, started, ended and finished. The finished jobs
are put into the state as the fold leaves them, an id and how it ended; the same turns are taken on both states in turn.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

from stoker_chassis.hosting import relax_collector
from stoker_scheduler.state import Over

from .scheduler_world import World, job_spec

NODES, AT_ONCE, ROUNDS = 64, 256, 30


def world(finished: int) -> World:
    made = World()
    for number in range(NODES):
        made.join(f"node-{number:03d}")
    over = Over("succeeded", "ok")
    made.state.over.update((f"job-{number:016d}", over) for number in range(finished))
    return made


def one_round(made: World, round_: int) -> float:
    """Seconds that so many jobs take from submission to their end."""
    spec = job_spec(2, 1)
    began = time.process_time()
    names = [f"round-{round_}-{number}" for number in range(AT_ONCE)]
    for name in names:
        made.submit(name, spec)
    made.land(made.scheduler.cycle(made.at_ms).out.actions)
    started = [name for name in names if made.state.jobs[name].attempt is not None]
    assert len(started) == AT_ONCE, "all of them fit"
    for name in started:
        made.end(name)
    made.land(made.scheduler.cycle(made.at_ms).out.actions)
    assert all(name in made.state.over for name in names)
    return time.process_time() - began


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(finished: int = 1_000_000) -> dict[str, Any]:
    empty = world(0)
    before = resident()
    full = world(finished)
    grown = resident() - before
    relax_collector()
    gc.collect()
    gc.freeze()
    spent: dict[str, list[float]] = {"empty": [], "full": []}
    for round_ in range(ROUNDS):
        spent["empty"].append(one_round(empty, round_))
        spent["full"].append(one_round(full, round_))
    best = {name: min(seconds) for name, seconds in spent.items()}
    # Round by round, since machines have slow moments: those hit both.
    ratios = [one / other for one, other in zip(spent["empty"], spent["full"], strict=True)]
    return {
        "finished": finished,
        "starts_per_s_empty": round(AT_ONCE / best["empty"]),
        "starts_per_s": round(AT_ONCE / best["full"]),
        "ratio": round(statistics.median(ratios), 3),
        "bytes_per_finished_job": round(grown / finished),
    }
