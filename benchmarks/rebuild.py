"""Rebuild of the scheduler's state from a log of half a million events, without a snapshot.

The log is generated through the scheduler's own decisions (jobs submitted, placed, started, ended, sealed, finished),
stored on a real nats-server, and then read and folded from the start.
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

import nats
from stoker_chassis.hosting import relax_collector
from stoker_chassis.jetstream import connect
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
from stoker_scheduler.evolve import evolve
from stoker_scheduler.state import State, state_hash

SPEC = JobSpec.model_validate(
    {
        "experiment_name": "rebuild",
        "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2},
        "entrypoint": "train.py",
    }
)
GPUS = tuple(Gpu(uuid=f"g{i}", index=i, model="SIM", name="SIM", memory_bytes=1) for i in range(2))
IN_FLIGHT = 200


def history(count: int) -> Iterator[Event]:
    """A valid history: one node on which job after job runs to its end, nine events each."""
    yield NodeJoined(node="n", boot_epoch="b", gpus=GPUS, cpus=1, memory_bytes=1, simulated=True)
    yield NodeReady(node="n", boot_epoch="b", rule="self-test", reason="passed")
    seq, number = 2, 0
    allocation = (Allocation(node="n", boot_epoch="b", gpus=("g0", "g1"), node_rank=0),)
    while seq + 9 <= count:
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
        seq, number = seq + 9, number + 1


async def fill(url: str, count: int) -> int:
    """Publish the history as fast as one client can; order is kept because one connection keeps it."""
    nc = await nats.connect(url, pending_size=64 * 2**20)
    js = nc.jetstream(timeout=60, publish_async_max_pending=IN_FLIGHT)
    stored = 0
    last = None
    for event in history(count):
        stored += 1
        envelope = seal(event, id=f"e{stored}", source="bench", time="2026-01-01T00:00:00Z", actor="bench")
        last = await js.publish_async(envelope.subject, encode(envelope))
    if last is not None:
        await last
    await js.publish_async_completed()
    await nc.close()
    return stored


async def measure(count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        # Filling needs no durability: the store is thrown away.
        async with EmbeddedNats(Path(folder), sync_interval="2m") as server, connect(server.url, "bench") as bus:
            began = time.perf_counter()
            stored = await fill(server.url, count)
            print(f"stored {stored} events in {time.perf_counter() - began:.0f} s", file=sys.stderr)
            relax_collector()  # as every service does when it starts
            state = State()
            began = time.perf_counter()
            async for recorded in bus.log.follow():
                state = evolve(state, recorded)
                if recorded.seq == stored:
                    break
            seconds = time.perf_counter() - began
    finished = sum(job.state == "succeeded" for job in state.jobs.values())
    assert finished == len(state.jobs) == (stored - 2) // 9, "every job of the history has succeeded"
    assert state.voided == 0, "every decision of the history held"
    print(f"state hash {state_hash(state)}", file=sys.stderr)
    return {
        "events": stored,
        "jobs": finished,
        "seconds": round(seconds, 2),
        "events_per_s": round(stored / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=500_000)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.events))))


if __name__ == "__main__":
    main()
