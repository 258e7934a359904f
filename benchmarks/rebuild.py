"""How soon a scheduler knows its state after it starts: from the whole log, and from a snapshot and what came after.

The log is generated through the scheduler's own decisions (jobs submitted, placed, started, ended, sealed, finished),
and stored on a real nats-server. Timed is what a service does that starts as a standby: from the first call to the
moment when everything up to the log's end is folded. The snapshot is as old as one can get, one interval. The last line
is the result; `_cpu_s` is this process's processor time, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nats
from stoker_chassis.eventlog import Position
from stoker_chassis.hosting import relax_collector
from stoker_chassis.jetstream import connect
from stoker_chassis.resume import EVERY
from stoker_chassis.service import lead
from stoker_chassis.stores import Bus, Snapshot, Snapshots
from stoker_local.nats import EmbeddedNats
from stoker_proto import (
    Allocation,
    AttemptExited,
    AttemptPlaced,
    AttemptReleased,
    AttemptStarted,
    DecisionBatch,
    Event,
    Finish,
    Gpu,
    JobFinished,
    JobSpec,
    JobSubmitted,
    LogsSealed,
    NodeJoined,
    NodeReady,
    Place,
    RankExit,
    encode,
    seal,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.state import state_hash

SPEC = JobSpec.model_validate(
    {
        "experiment_name": "rebuild",
        "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2},
        "entrypoint": "train.py",
    }
)
GPUS = tuple(Gpu(uuid=f"g{i}", index=i, model="SIM", name="SIM", memory_bytes=1) for i in range(2))
IN_FLIGHT = 200
EVENTS_A_JOB = 9


def history(count: int) -> Iterator[Event]:
    """A valid history: one node on which job after job runs to its end, nine events each."""
    yield NodeJoined(node="n", boot_epoch="b", gpus=GPUS, cpus=1, memory_bytes=1, simulated=True)
    yield NodeReady(node="n", boot_epoch="b", rule="self-test", reason="passed")
    seq, number = 2, 0
    allocation = (Allocation(node="n", boot_epoch="b", gpus=("g0", "g1"), node_rank=0),)
    while seq + EVENTS_A_JOB <= count:
        job = f"job-{number:07d}"
        fence = seq + 2
        part = {"job_id": job, "attempt": 1, "node": "n", "fence": fence}
        place = Place(job_id=job, attempt=1, allocations=allocation, preflight="fresh")
        yield JobSubmitted(job_id=job, spec=SPEC, spec_hash="0" * 64)
        yield DecisionBatch(based_on_seq=seq + 1, actions=(place,))
        yield AttemptPlaced(job_id=job, attempt=1, fence=fence, allocations=allocation, preflight="fresh")
        yield AttemptStarted.model_validate(part | {"ranks": (0, 1)})
        yield AttemptExited.model_validate(part | {"outcome": "ok", "ranks": (RankExit(rank=0, code=0),)})
        yield AttemptReleased.model_validate(part | {"proof": "process group gone"})
        yield LogsSealed.model_validate(part | {"streams": ()})
        done = Finish(job_id=job, state="succeeded", outcome="ok")
        yield DecisionBatch(based_on_seq=seq + 7, actions=(done,))
        yield JobFinished(job_id=job, state="succeeded", outcome="ok", attempts=1, gpu_ms=0)
        seq, number = seq + EVENTS_A_JOB, number + 1


async def fill(url: str, count: int) -> int:
    """Publish the history as fast as one client can; order is kept because one connection keeps it."""
    nc = await nats.connect(url, pending_size=64 * 2**20)
    js = nc.jetstream(timeout=60, publish_async_max_pending=IN_FLIGHT)
    stored = 0
    last = None
    for event in history(count):
        stored += 1
        id_ = f"01KDTV{stored:020d}"
        envelope = seal(
            event, id=id_, source="scheduler/bench", time="2026-01-01T00:00:00.000Z", actor="scheduler/bench"
        )
        last = await js.publish_async(envelope.subject, encode(envelope), headers={"Nats-Msg-Id": id_})
    if last is not None:
        await last
    await js.publish_async_completed()
    await nc.close()
    return stored


class Rebuilt(NamedTuple):
    """A scheduler that knows everything, and how long that took."""

    scheduler: Scheduler
    seconds: float
    cpu: float


async def rebuild(bus: Bus, snapshots: Snapshots | None = None) -> Rebuilt:
    """Start a scheduler as a standby and wait until it has folded everything."""
    scheduler = Scheduler(Timing())
    known = asyncio.Event()
    ended = 0.0, 0.0

    async def after_fold(leading: bool) -> None:
        nonlocal ended
        assert not leading, "somebody else has the lease"
        if not known.is_set():
            ended = time.perf_counter(), time.process_time()
            known.set()

    began = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        work = lead(bus, "scheduler", "bench", scheduler, after_fold=after_fold, snapshots=snapshots)
        standby = tasks.create_task(work)
        await known.wait()
        standby.cancel()
    return Rebuilt(scheduler, ended[0] - began[0], ended[1] - began[1])


async def snapshot_at(bus: Bus, seq: int) -> None:
    """Leave the snapshot that a leader would have left at this event."""
    scheduler = Scheduler(Timing())
    async for recorded in bus.log.follow():
        if type(recorded.event).type_name in scheduler.wants:
            scheduler.evolve(recorded)
        if recorded.seq == seq:
            at = Position(seq, recorded.envelope.id, recorded.at_ms)
            began = time.perf_counter()
            data = scheduler.dump()
            dumped = time.perf_counter()
            await bus.snapshots.save("scheduler", Snapshot(at, scheduler.schema, data))
            took = f"dumped in {dumped - began:.2f} s, saved in {time.perf_counter() - dumped:.2f} s"
            print(f"snapshot at {seq}: {len(data)} bytes, {took}", file=sys.stderr)
            return


async def measure(jobs: int, age: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        # Filling needs no durability: the store is thrown away.
        async with EmbeddedNats(Path(folder), sync_interval="2m") as server, connect(server.url, "bench") as bus:
            began = time.perf_counter()
            stored = await fill(server.url, 2 + EVENTS_A_JOB * jobs)
            print(f"stored {stored} events in {time.perf_counter() - began:.0f} s", file=sys.stderr)
            await bus.lease.acquire("scheduler", "somebody else", 3600)
            relax_collector()  # as every service does when it starts
            whole = await rebuild(bus)
            print(f"from the whole log: {whole.seconds:.2f} s, cpu {whole.cpu:.2f} s", file=sys.stderr)
            await snapshot_at(bus, stored - age)
            short = await rebuild(bus, bus.snapshots)
    state = whole.scheduler.state
    finished = sum(over.state == "succeeded" for over in state.over.values())
    assert finished == jobs, "every job of the history has succeeded"
    assert not state.jobs, "and none is left"
    assert (state.voided, state.ignored) == (0, 0), "everything in the history held"
    told = [state_hash(each.scheduler.state) for each in (whole, short)]
    assert told[0] == told[1], "both ways lead to the same state"
    print(f"state hash {told[0]}", file=sys.stderr)
    return {
        "events": stored,
        "jobs": jobs,
        "rebuild_s": round(whole.seconds, 2),
        "rebuild_cpu_s": round(whole.cpu, 2),
        "rebuild_snapshot_s": round(short.seconds, 2),
        "rebuild_snapshot_cpu_s": round(short.cpu, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=64_000)
    parser.add_argument("--age", type=int, default=EVERY, help="events that came after the snapshot")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.jobs, arguments.age))))


if __name__ == "__main__":
    main()
