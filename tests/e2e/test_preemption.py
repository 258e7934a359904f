"""A job that gives way to a more important one, on the whole system: nothing is lost, and everybody can see why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import yaml

from stoker import Client
from stoker_chassis.jetstream import connect
from stoker_local.supervisor import Plan, System, running
from stoker_proto import (
    AttemptExited,
    AttemptReleased,
    AttemptStarted,
    CheckpointSaved,
    DecisionBatch,
    Event,
    JobFinished,
    JobRequeued,
    Recorded,
    Stop,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SLEEPER = Path(__file__).parents[2] / "examples" / "sleeper"
# Whoever runs may be preempted at once; in real life it first runs for a while.
CLUSTER = {"scheduling": {"min_run_minutes": 0, "first_checkpoint_minutes": 0}}
BOTH = {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2}
BREAKING = """
import time
from stoker import training
print("training", flush=True)
while not training.should_stop():
    time.sleep(0.02)
raise MemoryError("no room for the state")
"""
E = TypeVar("E", bound=Event)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """One node with two GPUs, and nobody else on it."""
    plan = Plan(data=tmp_path_factory.mktemp("one"), nodes=1, gpus_per_node=2, mlflow=False)
    async with running(plan, print) as up:
        yield up


def victim() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((SLEEPER / "job.yaml").read_text())
    spec["compute"] |= BOTH
    spec["parameters"] = {"max_steps": 300, "step_seconds": 0.02, "checkpoint_steps": 1000}
    return spec


def urgent(command: str) -> dict[str, Any]:
    return {
        "experiment_name": "urgent", "compute": BOTH | {"priority_class": "CRITICAL"}, "command": command,
    }  # fmt: skip


def breaking(folder: Path) -> dict[str, Any]:
    """A job that runs out of memory while it saves."""
    (folder / "train.py").write_text(BREAKING)
    return {
        "experiment_name": "breaking", "compute": BOTH | {"priority_class": "BEST_EFFORT"},
        "code_source": {"root_path": "."}, "entrypoint": "train.py",
    }  # fmt: skip


class Log:
    """What has happened, by kind."""

    def __init__(self, records: list[Recorded]) -> None:
        self.records = records

    def one(self, kind: type[E], **wanted: object) -> tuple[int, E]:
        """The only event of this kind with these fields, and its sequence."""
        found = [
            (r.seq, r.event)
            for r in self.records
            if isinstance(r.event, kind) and all(getattr(r.event, k) == v for k, v in wanted.items())
        ]
        assert len(found) == 1, f"{len(found)} of {kind.__name__} {wanted}"
        return found[0]

    def stop_of(self, job_id: str) -> tuple[int, Stop]:
        found = [
            (r.seq, action)
            for r in self.records
            if isinstance(r.event, DecisionBatch)
            for action in r.event.actions
            if isinstance(action, Stop) and action.job_id == job_id
        ]
        assert len(found) == 1, found
        return found[0]


def first_line(client: Client, job_id: str) -> str:
    return str(next(client.logs(job_id, follow=True))["line"])


async def test_a_critical_job_takes_the_gpus_and_the_one_that_gave_way_loses_nothing(system: System) -> None:
    with Client(system.card.url, system.card.token) as client:
        await asyncio.to_thread(client.configure, CLUSTER)
        low = (await asyncio.to_thread(client.submit, victim(), code_root=SLEEPER))["job_id"]
        assert (await asyncio.to_thread(first_line, client, low)) == "starting at step 0"
        high = (await asyncio.to_thread(client.submit, urgent("sleep 1")))["job_id"]
        assert (await asyncio.to_thread(client.wait, high, timeout=60))["state"] == "succeeded"
        assert (await asyncio.to_thread(client.wait, low, timeout=60))["state"] == "succeeded"
        timeline = [f"{line['what']}: {line['detail']}" for line in await asyncio.to_thread(client.timeline, low)]
        said = [line["line"] for line in await asyncio.to_thread(lambda: list(client.logs(low, rank=0)))]
    async with connect(system.card.nats_url, "test") as bus:
        log = Log([r async for r in bus.log.read()])

    stopped, stop = log.stop_of(low)
    assert (stop.reason, stop.by, stop.rule, stop.attempt) == ("preempted", high, "higher_class", 1)
    saved, checkpoint = log.one(CheckpointSaved, job_id=low, attempt=1)
    exited, ended = log.one(AttemptExited, job_id=low, attempt=1)
    released, _ = log.one(AttemptReleased, job_id=low, attempt=1)
    began, _ = log.one(AttemptStarted, job_id=high)
    over, _ = log.one(AttemptReleased, job_id=high)
    again, second = log.one(AttemptStarted, job_id=low, attempt=2)
    assert stopped < saved < exited < released < began < over < again
    assert (ended.outcome, ended.asked) == ("preempted", "preempted")
    assert second.resume_step == checkpoint.step

    _, requeued = log.one(JobRequeued, job_id=low)
    assert requeued.outcome == "preempted"
    assert high in requeued.cause, "the reason names who preempted"
    assert [line for line in timeline if high in line and "class" in line], timeline
    _, finished = log.one(JobFinished, job_id=low)
    assert finished.attempts == 2
    assert said == [
        "starting at step 0", f"giving way after step {checkpoint.step}", f"starting at step {checkpoint.step}",
        "done after 300 steps",
    ]  # fmt: skip


async def test_a_job_that_breaks_while_it_gives_way_has_failed_and_is_not_started_again(
    system: System, tmp_path: Path
) -> None:
    with Client(system.card.url, system.card.token) as client:
        await asyncio.to_thread(client.configure, CLUSTER)
        low = (await asyncio.to_thread(client.submit, breaking(tmp_path), code_root=tmp_path))["job_id"]
        assert (await asyncio.to_thread(first_line, client, low)) == "training"
        high = (await asyncio.to_thread(client.submit, urgent("true")))["job_id"]
        assert (await asyncio.to_thread(client.wait, high, timeout=60))["state"] == "succeeded"
        ended = await asyncio.to_thread(client.wait, low, timeout=60)
    assert (ended["state"], ended["outcome"], len(ended["attempts"])) == ("failed", "oom", 1)
    assert ended["problem"]["code"] == "host_oom"
