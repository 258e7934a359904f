"""A tracker beside a real MLflow: every job has one exact run, whatever is deleted, refused or away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from requests.exceptions import ConnectionError

from stoker_chassis.clock import stamp
from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_proto import LogsSealed, MirrorCompleted, RunMirrored, SealedStream, subjects
from stoker_tracker.checkpoint import Checkpoint
from stoker_tracker.mapping import Measured, NewRun, Update, clean_key
from stoker_tracker.mirror import Closed, Mirror
from stoker_tracker.tracker import Tracker
from tests.integration.tracker_mlflow import MlflowServer, content
from tests.integration.tracker_story import Story
from tests.waiting import until

# MLflow's client leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill9()


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


@contextlib.asynccontextmanager
async def tracking(bus: Bus, url: str, folder: Path) -> AsyncIterator[None]:
    mirror = Mirror(url, pause_s=0.1)
    task = asyncio.create_task(Tracker(bus, mirror, Checkpoint(folder / "checkpoint.json"), 0.05).run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def held(server: MlflowServer, experiment: str, job_id: str) -> dict[str, object]:
    everything = await asyncio.to_thread(content, server.url, experiment)
    run: dict[str, object] = everything[job_id]
    return run


async def test_a_whole_job_is_one_run_with_everything_in_it(mlflow: MlflowServer, memory: Bus, tmp_path: Path) -> None:
    story = Story(memory, tmp_path / "files", "whole", experiment="whole", lossy=True)
    async with tracking(memory, mlflow.url, tmp_path):
        await story.whole("failed")
        done = await story.mirrored()
    run = await held(mlflow, "whole", "whole")
    points = story.points(1, range(25)) + story.points(2, range(20, 40))
    assert (done.points, done.rejects) == (len(points), ())
    assert run["status"] == "FAILED"
    assert run["params"] == {"lr": "0.0003", "opt.name": "adamw", clean_key("hits@10"): "1"}
    tags = run["tags"]
    assert isinstance(tags, dict)
    told = {
        "stoker.job_id": "whole", "stoker.status": "failed", "stoker.outcome": "user_error", "stoker.attempts": "2",
        "stoker.attempt.1.outcome": "infra_gpu", "stoker.attempt.2.resume_step": "20",
        "stoker.problem_code": "exit_code", "stoker.problem": "it ended with code 3",
    }  # fmt: skip
    assert told.items() <= tags.items()
    metrics = run["metrics"]
    assert isinstance(metrics, dict)
    losses = [(p.step, p.time_ms) for p in points if p.key == "train/loss"]
    assert [(step, at) for step, at, _ in metrics["train/loss"]] == sorted(losses)
    values = {(step, at): value for step, at, value in metrics["train/loss"]}
    assert values[7, losses[7][1]] == "nan" and values[8, losses[8][1]] > 1e308
    assert metrics["stoker/gpu_hours"][0][2] == 0.1
    assert run["artifacts"] == {
        "logs/attempt-1/n1/rank-0.stdout": "attempt 1\ndone\n",
        "logs/attempt-2/n1/rank-0.stdout": "attempt 2\ndone\n",
    }


async def test_the_run_shows_how_the_job_stands_while_it_lives(
    mlflow: MlflowServer, memory: Bus, tmp_path: Path
) -> None:
    story = Story(memory, tmp_path / "files", "alive", experiment="alive")

    async def status() -> object:
        return (await held(mlflow, "alive", "alive"))["status"]

    async def shows(wanted: str) -> None:
        async def same() -> bool:
            with contextlib.suppress(KeyError):
                return await status() == wanted
            return False

        await until(same, 30)

    async with tracking(memory, mlflow.url, tmp_path):
        await story.submit()
        await shows("SCHEDULED")
        await story.place(1)
        await shows("RUNNING")
        await story.measure(1, story.points(1, range(10)))

        async def live() -> bool:
            metrics = (await held(mlflow, "alive", "alive"))["metrics"]
            return isinstance(metrics, dict) and len(metrics.get("train/loss", [])) == 10

        await until(live, 30)
        for attempt in (1, 2):
            await story.requeue(attempt, "preempted", f"preempted by urgent-{attempt}")

        async def told() -> bool:
            tags = (await held(mlflow, "alive", "alive"))["tags"]
            wanted = {"stoker.preemptions": "2", "stoker.attempt.2.cause": "preempted by urgent-2"}
            return isinstance(tags, dict) and wanted.items() <= tags.items()

        await until(told, 30)
        await story.finish("cancelled", attempts=1)
        await story.mirrored()
    assert await status() == "KILLED"


async def test_the_same_log_again_changes_nothing(mlflow: MlflowServer, memory: Bus, tmp_path: Path) -> None:
    story = Story(memory, tmp_path / "files", "again", experiment="again")
    async with tracking(memory, mlflow.url, tmp_path / "first"):
        await story.whole()
        await story.mirrored()
    before, end = await held(mlflow, "again", "again"), await memory.log.end()
    async with tracking(memory, mlflow.url, tmp_path / "second"):
        second = tmp_path / "second" / "checkpoint.json"
        await until(lambda: second.exists() and Checkpoint(second).progress.seq == end, 60)
    assert await held(mlflow, "again", "again") == before
    assert await memory.log.end() == end, "nothing was told twice"


async def test_a_deleted_experiment_comes_back(mlflow: MlflowServer, memory: Bus, tmp_path: Path) -> None:
    client = MlflowClient(tracking_uri=mlflow.url)
    experiment_id = await asyncio.to_thread(client.create_experiment, "deleted")
    await asyncio.to_thread(client.delete_experiment, experiment_id)
    story = Story(memory, tmp_path / "files", "undeleted", experiment="deleted")
    async with tracking(memory, mlflow.url, tmp_path):
        await story.submit()
        mirrored = subjects.job_event("undeleted", RunMirrored.verb)

        async def told() -> bool:
            return await memory.log.last(mirrored) is not None

        await until(told, 30)
        await asyncio.to_thread(client.delete_experiment, experiment_id)
        await story.place(1)
        await story.finish(attempts=1)
        done = await story.mirrored()
    run = await held(mlflow, "deleted", "undeleted")
    assert done.rejects == ()
    assert (run["status"], run["stage"]) == ("FINISHED", "active")


async def test_a_run_that_somebody_deleted_stays_deleted_and_blocks_nobody(
    mlflow: MlflowServer, memory: Bus, tmp_path: Path
) -> None:
    client = MlflowClient(tracking_uri=mlflow.url)
    gone, next_one = (Story(memory, tmp_path / "files", job_id, experiment="gone") for job_id in ("gone", "next"))
    async with tracking(memory, mlflow.url, tmp_path):
        await gone.submit()

        async def told() -> bool:
            return await memory.log.last(subjects.job_event("gone", RunMirrored.verb)) is not None

        await until(told, 30)
        last = await memory.log.last(subjects.job_event("gone", RunMirrored.verb))
        assert last and isinstance(last.event, RunMirrored)
        await asyncio.to_thread(client.delete_run, last.event.run_id)
        await gone.place(1)
        await gone.finish(attempts=1)
        await next_one.whole()
        assert (await gone.mirrored()).rejects
        assert (await next_one.mirrored()).rejects == ()
    assert (await held(mlflow, "gone", "gone"))["stage"] == "deleted"


async def test_rubbish_keeps_nothing_else_out(mlflow: MlflowServer, memory: Bus, tmp_path: Path) -> None:
    story = Story(memory, tmp_path / "files", "rubbish", experiment="rubbish")
    metric = subjects.metric("rubbish", 1)
    async with tracking(memory, mlflow.url, tmp_path):
        await memory.telemetry.publish(metric, b"no json", "x1")
        strange = b'{"job_id":"nobody","attempt":1,"rank":0,"first":0,"points":[]}'
        await memory.telemetry.publish(subjects.metric("nobody", 1), strange, "x2")
        await story.submit()
        missing = SealedStream(stream="rank-0.stdout", digest="0" * 64, lines=1, bytes=1)
        lost = LogsSealed(job_id="rubbish", attempt=1, node="n2", fence=10, streams=(missing,))
        await story.tell(lost)
        points = story.points(1, range(10))
        await story.seal(1, points)
        await story.finish(attempts=1)
        done = await story.mirrored()
    assert done.points == len(points)
    assert done.rejects == (f"rank-0.stdout of n2: blob {'0' * 64} is missing",)
    assert (await held(mlflow, "rubbish", "rubbish"))["status"] == "FINISHED"


async def test_logs_sealed_after_the_end_still_arrive(mlflow: MlflowServer, memory: Bus, tmp_path: Path) -> None:
    story = Story(memory, tmp_path / "files", "late", experiment="late")
    async with tracking(memory, mlflow.url, tmp_path):
        await story.submit()
        await story.finish(attempts=1)
        await story.mirrored()
        await story.seal(1, story.points(1, range(3)))

        async def there() -> bool:
            return bool((await held(mlflow, "late", "late"))["artifacts"])

        await until(there, 30)
    metrics = (await held(mlflow, "late", "late"))["metrics"]
    assert isinstance(metrics, dict) and len(metrics["train/loss"]) == 3


async def test_another_log_than_before_is_mirrored_from_its_start(
    mlflow: MlflowServer, memory: Bus, tmp_path: Path
) -> None:
    Checkpoint(tmp_path / "checkpoint.json").note(seq=1, event_id="of another log", samples=0)
    story = Story(memory, tmp_path / "files", "diverged", experiment="diverged")
    await story.whole()
    async with tracking(memory, mlflow.url, tmp_path):
        assert (await story.mirrored()).rejects == ()


def test_one_bad_point_in_a_thousand_is_refused_alone(mlflow: MlflowServer) -> None:
    mirror = Mirror(mlflow.url, pause_s=0.01)
    client = MlflowClient(tracking_uri=mlflow.url)
    run_id = client.create_run(client.create_experiment("bad-point")).info.run_id
    points = [Measured("loss", 1.0, step, 1_800_000_000_000) for step in range(1000)]
    points[613] = Measured("bad//key", 1.0, 613, 1_800_000_000_000)
    (refused,) = mirror.points(run_id, points)
    assert "bad//key" in refused
    assert len(client.get_metric_history(run_id, "loss")) == 999


def test_one_bad_tag_keeps_neither_the_others_nor_the_status_out(mlflow: MlflowServer) -> None:
    mirror = Mirror(mlflow.url, pause_s=0.01)
    client = MlflowClient(tracking_uri=mlflow.url)
    run_id = client.create_run(client.create_experiment("bad-tag")).info.run_id
    (refused,) = mirror.change(run_id, Update((("good", "1"), ("bad//key", "2"), ("fine", "3")), "KILLED"))
    run = client.get_run(run_id)
    assert "bad//key" in refused
    assert (run.data.tags["good"], run.data.tags["fine"], run.info.status) == ("1", "3", "KILLED")


class HalfDeaf(MlflowClient):
    """Loses the answer to the first making of a run, as a server does that dies at that moment."""

    lost = False

    def create_run(self, *arguments: Any, **named: Any) -> Any:
        made = super().create_run(*arguments, **named)
        if not self.lost:
            self.lost = True
            raise ConnectionError("no answer")
        return made


def test_a_run_whose_making_was_not_answered_is_not_made_twice(mlflow: MlflowServer) -> None:
    mirror = Mirror(mlflow.url, pause_s=0.01)
    client = mirror._client = HalfDeaf(mlflow.url)
    wanted = NewRun("half-deaf", "j", 1_800_000_000_000, (("lr", "1"),), (("stoker.job_id", "j"),))
    first, refused = mirror.ensure_run("j", wanted)
    again, _ = mirror.ensure_run("j", wanted)
    assert client.lost and first == again and refused == []
    assert len(client.search_runs([first.experiment_id])) == 1


def test_a_mirror_that_waits_for_a_server_ends_when_it_is_closed() -> None:
    mirror = Mirror("http://127.0.0.1:9", pause_s=30)

    async def close_soon() -> None:
        waiting = asyncio.create_task(asyncio.to_thread(mirror.change, "r", Update(status="RUNNING")))
        await asyncio.sleep(0.2)
        mirror.close()
        with pytest.raises(Closed):
            await waiting

    began = time.monotonic()
    asyncio.run(close_soon())
    assert time.monotonic() - began < 20


async def test_what_is_said_once_is_not_said_again_when_the_log_has_forgotten_the_id(
    mlflow: MlflowServer, memory: Bus, tmp_path: Path
) -> None:
    story = Story(memory, tmp_path / "files", "said", experiment="said")
    async with tracking(memory, mlflow.url, tmp_path / "first"):
        await story.submit()
        await story.finish(attempts=1)
        told = await story.mirrored()
    other = memory_bus(tmp_path / "blobs")
    async for recorded in memory.log.read():
        fresh = stamp(recorded.event, "test", id=recorded.envelope.id)
        await other.log.append(fresh)
    other.log._ids.clear()  # type: ignore[attr-defined]
    end = await other.log.end()
    async with tracking(other, mlflow.url, tmp_path / "second"):
        second = tmp_path / "second" / "checkpoint.json"
        await until(lambda: second.exists() and Checkpoint(second).progress.seq == end, 30)
    assert await other.log.end() == end
    last = await other.log.last(subjects.job_event("said", MirrorCompleted.verb))
    assert last and last.event == told
