"""Jobs started per second through the real log: 640 nodes of 8 GPUs, 15,000 jobs in 30 queues, Kueue's own mix.

The scheduler is the real process, with its lease, its log and its desired state on a nats-server that syncs every
write. Simulated are the gateway, which submits as fast as it can, and the launchers, which make desired state true at
once and let jobs run as long as Kueue's do. The numbers are the log's own: from the first submission to the last start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from stoker_chassis.clock import stamp
from stoker_chassis.jetstream import connect
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import (
    AttemptExited,
    AttemptReleased,
    AttemptStarted,
    Cluster,
    ClusterConfigured,
    Event,
    JobFinished,
    JobSubmitted,
    LogsSealed,
    PendingReasonChanged,
    Recorded,
)

from .scheduler_world import DONE, job_spec, joining

COHORTS, IN_COHORT = 5, 6
# Of twenty jobs: how many, GPUs, nodes, milliseconds, class. Kueue's small, medium and large.
MIX = ((14, 1, 1, 200, "small"), (4, 8, 1, 500, "medium"), (2, 8, 2, 1000, "large"))
CLASSES = {"small": 50, "medium": 100, "large": 200}
AT_ONCE = 250
LIMIT_S = 600.0


def cluster(gpus: int) -> Cluster:
    """Five cohorts of six queues that may borrow from each other."""
    queues: list[dict[str, Any]] = []
    for cohort in range(COHORTS):
        queues.append({"name": f"cohort-{cohort}", "gpus": {"nominal": gpus // COHORTS}})
        for at in range(IN_COHORT):
            quota = {"nominal": gpus // COHORTS // IN_COHORT, "limit": gpus // COHORTS}
            queues.append({"name": f"queue-{cohort}-{at}", "parent": f"cohort-{cohort}", "gpus": quota})
    classes = [{"name": name, "value": value} for name, value in CLASSES.items()]
    return Cluster.model_validate({"queues": queues, "classes": classes})


def submissions(count: int) -> Iterable[JobSubmitted]:
    kinds = [(gpus, nodes, ms, name) for times, gpus, nodes, ms, name in MIX for _ in range(times)]
    made: dict[object, Any] = {}
    for i in range(count):
        gpus, nodes, ms, name = kinds[i * 7 % len(kinds)]  # small, medium and large take turns
        queue = f"queue-{i % COHORTS}-{i // COHORTS % IN_COHORT}"
        key = (gpus, nodes, queue)
        if key not in made:
            spec = job_spec(gpus, nodes, queue=queue, priority_class=name)
            made[key] = spec.model_copy(update={"parameters": {"ms": ms}})
        yield JobSubmitted(job_id=f"job-{i:06d}", spec=made[key], spec_hash="0" * 64)


class Writer:
    """Appends events of many senders in their order: what has gathered meanwhile goes together, as one write."""

    def __init__(self, bus: Bus, source: str) -> None:
        self._bus = bus
        self._source = source
        self._waiting: list[Event] = []
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()

    def write(self, events: Iterable[Event]) -> None:
        self._waiting += events
        self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self.flush()

    async def flush(self) -> None:
        async with self._lock:
            while self._waiting:
                some, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
                await self._bus.log.append_all([stamp(event, self._source) for event in some])


class Launchers:
    """All launchers of the cluster: what their nodes should run is started at once and ends in its time."""

    def __init__(self, bus: Bus, jobs: int) -> None:
        self._bus = bus
        self._jobs = jobs
        self.writer = Writer(bus, "launcher/bench")
        self._known: set[tuple[str, str, int]] = set()
        self._started: set[str] = set()
        self.all_started = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self.writer.run())

    async def _watch(self) -> None:
        async for payload in self._bus.assignments.watch(">"):
            wanted = from_json(payload)
            for attempt in wanted["attempts"]:
                self._obey(wanted["node"], attempt)

    def _obey(self, node: str, wanted: dict[str, Any]) -> None:
        key = (node, wanted["job_id"], wanted["attempt"])
        if key in self._known or wanted["want"] != "run":
            return
        self._known.add(key)
        part = {"job_id": key[1], "attempt": key[2], "node": node, "fence": wanted["fence"]}
        self.writer.write((AttemptStarted.model_validate(part | {"ranks": (0,)}),))
        end = (
            AttemptExited.model_validate(part | {"outcome": "ok", "ranks": DONE}),
            AttemptReleased.model_validate(part | {"proof": "process group gone"}),
            LogsSealed.model_validate(part | {"streams": ()}),
        )
        asyncio.get_running_loop().call_later(wanted["spec"]["parameters"]["ms"] / 1000, self.writer.write, end)
        self._started.add(key[1])
        if len(self._started) == self._jobs:
            self.all_started.set()


async def measure(nodes: int, jobs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        async with EmbeddedNats(folder / "nats") as server, connect(server.url, "bench") as bus:
            writer = Writer(bus, "bench")
            await bus.log.append(stamp(ClusterConfigured(version=1, cluster=cluster(8 * nodes)), "bench"))
            for i in range(nodes):
                writer.write(joining(f"node-{i:04d}", "H100", 8, {"rack": f"rack-{i // 16}"}))
            await writer.flush()
            async with scheduler(server.url, folder) as process:
                launchers = Launchers(bus, jobs)
                running = asyncio.create_task(launchers.run())
                try:
                    async with asyncio.timeout(LIMIT_S):
                        before = cpu_s(process.pid)
                        writer.write(submissions(jobs))
                        await writer.flush()
                        await launchers.all_started.wait()
                        await launchers.writer.flush()
                        spent = cpu_s(process.pid) - before
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
            return await tell(bus, jobs) | {"scheduler_cpu_ms_per_job": round(spent / jobs * 1000, 2)}


@contextlib.asynccontextmanager
async def scheduler(url: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The real service, once it serves."""
    ready = folder / "ready"
    env = os.environ | {"STOKER_NATS_URL": url, "STOKER_INSTANCE": "bench", "STOKER_READY_FILE": str(ready)}
    with (folder / "scheduler.log").open("wb") as out:
        argv = [sys.executable, *os.environ.get("BENCH_PY", "").split(), "-m", "stoker_scheduler"]
        process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=out, stderr=out)
    try:
        while not ready.exists():
            if process.returncode is not None:
                raise RuntimeError((folder / "scheduler.log").read_text())
            await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def tell(bus: Bus, jobs: int) -> dict[str, Any]:
    """What the log says of it."""
    submitted: dict[str, Recorded] = {}
    started: dict[str, int] = {}
    counts: Counter[str] = Counter()
    end = await bus.log.end()
    async for burst in bus.log.bursts():
        for recorded in burst.recorded:
            event = recorded.event
            counts[event.type_name] += 1
            if isinstance(event, JobSubmitted):
                submitted[event.job_id] = recorded
            elif isinstance(event, AttemptStarted):
                started.setdefault(event.job_id, recorded.at_ms)
        if burst.position.seq >= end:
            break
    first = min(recorded.at_ms for recorded in submitted.values())
    last_submitted = max(recorded.at_ms for recorded in submitted.values())
    seconds = (max(started.values()) - first) / 1000
    waits: dict[str, list[float]] = {}
    for job_id, recorded in submitted.items():
        assert isinstance(recorded.event, JobSubmitted)
        kind = recorded.event.spec.compute.priority_class
        waits.setdefault(kind, []).append((started[job_id] - recorded.at_ms) / 1000)
    print(dict(counts), file=sys.stderr)
    return {
        "jobs": jobs, "seconds": round(seconds, 2), "starts_per_s": round(jobs / seconds, 1),
        "submitted_in_s": round((last_submitted - first) / 1000, 2), "events": end,
        "finished": counts[JobFinished.type_name], "reasons_told": counts[PendingReasonChanged.type_name],
        "mean_wait_s": {kind: round(sum(found) / len(found), 2) for kind, found in waits.items()},
    }  # fmt: skip
