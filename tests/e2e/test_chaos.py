"""kill -9 of any one process at random moments, while ten short jobs run: nothing is lost, doubled or left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from mlflow import MlflowClient

from stoker import Client
from stoker_chassis.jetstream import connect
from stoker_local.supervisor import System
from stoker_proto import JobFinished, MirrorCompleted, Recorded, RunMirrored
from stoker_scheduler.evolve import evolve
from stoker_scheduler.state import State

JOB = Path(__file__).parent / "jobs" / "short" / "job.yaml"
JOBS = 10
SEED = int(os.environ.get("CHAOS_SEED", "20261201"))


async def until_mirrored(system: System, job_ids: set[str]) -> list[Recorded]:
    """The whole log, once every one of these jobs is finished and mirrored."""
    records: list[Recorded] = []
    waiting = set(job_ids)
    async with asyncio.timeout(150), connect(system.card.nats_url, "chaos") as bus:
        async for recorded in bus.log.follow():
            records.append(recorded)
            if isinstance(recorded.event, MirrorCompleted):
                waiting.discard(recorded.event.job_id)
            if not waiting:
                return records
    raise AssertionError("unreachable")


def kill(system: System, victim: str) -> None:
    if victim == "nats":
        system.nats.kill9()
        return
    pid = system.children[victim].pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


# MLflow's client leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

VICTIMS = ["gateway", "scheduler-1", "scheduler-2", "tracker", "launcher-node-1", "health-node-1", "nats"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("victim", VICTIMS)
async def test_ten_jobs_survive_the_death_of(victim: str, system: System) -> None:
    chance = random.Random(f"{SEED}-{victim}")
    client = Client(system.card.url, system.card.token)

    async def submit(number: int) -> str:
        job = await asyncio.to_thread(client.submit, JOB, idempotency_key=f"{victim}-{number}")
        return str(job["job_id"])

    async def strike() -> None:
        for _ in range(2):
            await asyncio.sleep(chance.uniform(0.2, 2.5))
            kill(system, victim)

    striking = asyncio.create_task(strike())
    job_ids = set(await asyncio.gather(*(submit(n) for n in range(JOBS))))
    assert len(job_ids) == JOBS
    await striking
    client.close()
    records = await until_mirrored(system, job_ids)
    check_log(records, job_ids)
    await asyncio.to_thread(check_mlflow, system, records, job_ids)


def check_log(records: list[Recorded], job_ids: set[str]) -> None:
    finished = [r.event for r in records if isinstance(r.event, JobFinished) and r.event.job_id in job_ids]
    assert sorted(f.job_id for f in finished) == sorted(job_ids), "each finished exactly once"
    assert {f.state for f in finished} == {"succeeded"}
    state = State()
    for recorded in records:
        state = evolve(state, recorded)
    held = {job_id for gpus in state.owner.values() for job_id, _ in gpus.values()}
    assert not held & job_ids, "no GPU is left allocated"


def check_mlflow(system: System, records: list[Recorded], job_ids: set[str]) -> None:
    mlflow = MlflowClient(tracking_uri=system.card.mlflow_url)
    runs = {r.event.job_id: r.event.run_id for r in records if isinstance(r.event, RunMirrored)}
    attempts = {r.event.job_id: r.event.attempts for r in records if isinstance(r.event, JobFinished)}
    for job_id in job_ids:
        marks = system.layout.data / "checkpoints" / job_id / "done"
        assert marks.read_text() == "done\n", f"{job_id} ran to its end exactly once"
        run = mlflow.get_run(runs[job_id])
        assert run.info.status == "FINISHED"
        history = mlflow.get_metric_history(runs[job_id], "loss")
        if attempts[job_id] == 1:
            assert [p.step for p in history] == list(range(20)), f"every point of {job_id} once, in order"
        lines = read_log(mlflow, runs[job_id], attempts[job_id])
        assert lines == [f"line {n}" for n in range(50)], f"every line of {job_id} once, in order"


def read_log(mlflow: MlflowClient, run_id: str, attempt: int) -> list[str]:
    (node,) = mlflow.list_artifacts(run_id, f"logs/attempt-{attempt}")
    path = mlflow.download_artifacts(run_id, f"{node.path}/rank-0.stdout")
    return Path(path).read_text().splitlines()
