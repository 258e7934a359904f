"""kill -9 of the tracker, and of MLflow, at random moments: MLflow ends up equal to a fresh mirror of the same log."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import JobFinished, MirrorCompleted, RunMirrored
from stoker_tracker.checkpoint import Checkpoint
from tests.integration.tracker_mlflow import MlflowServer, Process, content, tracker
from tests.integration.tracker_story import Story
from tests.waiting import until

SEED = int(os.environ.get("CHAOS_SEED", "20261201"))
JOBS, KILLS = 4, 5
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill9()


def stories(bus: Bus, folder: Path, experiment: str) -> list[Story]:
    return [
        Story(bus, folder, f"{experiment}-{n}", experiment=experiment, lossy=n % 2 == 1) for n in range(JOBS)
    ]  # fmt: skip


async def mirrored_afresh(
    nats_url: str, mlflow: MlflowServer, bus: Bus, folder: Path, experiment: str, known: int
) -> dict[str, Any]:
    """What MLflow holds once a new tracker has mirrored the same log into an experiment of its own."""
    client = MlflowClient(tracking_uri=mlflow.url)
    found = await asyncio.to_thread(client.get_experiment_by_name, experiment)
    assert found is not None
    await asyncio.to_thread(client.rename_experiment, found.experiment_id, f"{experiment}-before")
    fresh = tracker(nats_url, mlflow.url, folder)
    fresh.start()
    try:
        await until(lambda: completed(bus, 2 * known), 60)
    finally:
        fresh.kill9()
    return await asyncio.to_thread(content, mlflow.url, experiment)


async def completed(bus: Bus, count: int) -> bool:
    return len([r async for r in bus.log.read() if isinstance(r.event, MirrorCompleted)]) >= count


async def check_told_once(bus: Bus) -> None:
    events = [r.event async for r in bus.log.read()]
    jobs = [e.job_id for e in events if isinstance(e, JobFinished)]
    for kind in (RunMirrored, MirrorCompleted):
        told = [e.job_id for e in events if isinstance(e, kind)]
        assert sorted(told) == sorted(jobs), f"{kind.__name__} once a job"


async def strike(victim: Process, data: Path, chance: random.Random) -> None:
    """Kill the tracker after it has handled a few more events, and then a moment into the next one."""
    checkpoint = data / "tracker" / "checkpoint.json"
    reached = 0
    for _ in range(KILLS):
        target = reached + chance.randint(1, 6)
        await until(lambda target=target: Checkpoint(checkpoint).progress.seq >= target, 60)  # type: ignore[misc]
        await asyncio.sleep(chance.uniform(0, 0.1))
        victim.kill9()
        reached = Checkpoint(checkpoint).progress.seq
        victim.start()


@pytest.mark.slow
async def test_a_tracker_killed_at_random_points_leaves_what_a_fresh_mirror_would(
    bus: Bus, nats_server: EmbeddedNats, mlflow: MlflowServer, tmp_path: Path
) -> None:
    victim = tracker(nats_server.url, mlflow.url, tmp_path / "tracker")
    victim.start()
    try:
        striking = asyncio.create_task(strike(victim, tmp_path / "tracker", random.Random(SEED)))
        for story in stories(bus, tmp_path / "files", "killed"):
            await story.whole("failed" if story.job_id.endswith("3") else "succeeded")
        await striking
        await until(lambda: completed(bus, JOBS), 60)
    finally:
        victim.kill9()
    await check_told_once(bus)
    after_kills = await asyncio.to_thread(content, mlflow.url, "killed")
    assert len(after_kills) == JOBS
    assert after_kills == await mirrored_afresh(
        nats_server.url, mlflow, bus, tmp_path / "fresh", "killed", JOBS
    )  # fmt: skip


@pytest.mark.slow
async def test_an_mlflow_that_is_away_costs_nothing_but_time(
    bus: Bus, nats_server: EmbeddedNats, mlflow: MlflowServer, tmp_path: Path
) -> None:
    patient = tracker(nats_server.url, mlflow.url, tmp_path / "tracker")
    patient.start()
    try:
        early, late = stories(bus, tmp_path / "files", "away")[:2]
        await early.submit()
        await early.place(1)
        points = early.points(1, range(60))
        await early.measure(1, points[:40])
        mlflow.kill9()
        await early.measure(1, points[40:])
        await early.seal(1, points)
        await early.finish(attempts=1)
        await late.whole()
        mlflow.start()
        await until(lambda: completed(bus, 2), 90)
    finally:
        assert patient.stop() == 0, "it ends when asked to"
    await check_told_once(bus)
    backfilled = await asyncio.to_thread(content, mlflow.url, "away")
    assert len(backfilled) == 2
    assert backfilled == await mirrored_afresh(
        nats_server.url, mlflow, bus, tmp_path / "fresh", "away", 2
    )  # fmt: skip
