"""What becomes of an attempt that is asked to give way: it may save, break or be done, and it always ends."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stoker_chassis.device_simulated import SimulatedDevices, gpu_uuid
from stoker_chassis.jetstream import connect
from stoker_local.nats import EmbeddedNats
from stoker_proto import AttemptExited, AttemptReleased, AttemptStarted, CheckpointSaved
from tests.integration.launcher_node import LauncherNode, launched, lives, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRAINING = """
import os, time
from stoker import training
start = training.resume()
step = start[0] if start else 0
while not training.should_stop():
    step += 1
    print("step", step, flush=True)
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    training.save(step, lambda folder: (folder / "model").write_text(str(step)))
    print("saved", step, flush=True)
"""
BREAKS = """
import signal, time
def save(*_):
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
DONE = """
import time
from stoker import training
training.should_stop()
print("up", flush=True)
time.sleep(1)
print("evaluated", flush=True)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LauncherNode]:
    folder = tmp_path_factory.mktemp("stops")
    async with (
        EmbeddedNats(folder / "nats", sync_interval="10s") as server,
        connect(server.url, "test") as bus,
        launched(bus, server.url, folder / "data", STOKER_KEEP_ATTEMPTS_HOURS="0") as node,
    ):
        yield node


@pytest.mark.parametrize("reason", ["preempted", "window_closed"])
async def test_a_training_saves_within_the_grace_and_its_next_attempt_goes_on_from_there(
    node: LauncherNode, reason: str
) -> None:
    job, files = f"saves-{reason}", {"train.py": TRAINING}
    made = await node.place(job, files, outputs={"checkpoints": {}})
    await node.line_comes(job, "step 5", 0)
    await node.line_comes(job, "step 5", 1)
    await node.stop(job, reason, grace_ms=10_000)
    ended = await node.ends(job)
    assert (ended.outcome, ended.asked, ended.before_stop) == ("preempted", reason, ())
    assert [r.code for r in ended.ranks] == [0, 0]
    saved = await node.happens(CheckpointSaved, job)
    assert (await node.lines(job))[-1] == f"saved {saved.step}"
    kinds = await node.kinds(job)
    assert kinds.index("CheckpointSaved") < kinds.index("AttemptExited")
    await node.place(job, code=made.code, attempt=2, outputs={"checkpoints": {}})
    assert (await node.happens(AttemptStarted, job, 2)).resume_step == saved.step
    await node.stop(job, "cancelled", attempt=2)
    await node.ends(job, 2)


async def test_a_job_without_checkpoints_gives_way_all_the_same(node: LauncherNode) -> None:
    await node.place("plain", {"train.py": "import time\nprint('up', flush=True)\ntime.sleep(60)\n"})
    await node.line_comes("plain", "up", 0)
    await node.line_comes("plain", "up", 1)
    await node.stop("plain", "preempted", grace_ms=20_000)
    ended = await node.ends("plain")
    assert (ended.outcome, [r.signal for r in ended.ranks]) == ("preempted", [15, 15])
    assert "AttemptReleased" in await node.kinds("plain")


async def test_a_job_that_does_not_give_way_is_killed_when_its_grace_is_over(node: LauncherNode) -> None:
    script = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)\n"
    await node.place("deaf", {"train.py": script})
    await node.line_comes("deaf", "up", 0)
    await node.line_comes("deaf", "up", 1)
    await node.stop("deaf", "preempted", grace_ms=300)
    ended = await node.ends("deaf")
    assert (ended.outcome, [r.signal for r in ended.ranks]) == ("preempted", [9, 9])


async def test_a_shell_and_what_it_runs_both_hear_of_the_stop(node: LauncherNode) -> None:
    command = "trap 'echo shell; wait' TERM; (trap 'echo inner; exit 0' TERM; echo up; sleep 60 & wait) & wait"
    await node.place("shell", {"x": ""}, entrypoint=None, command=command)
    await node.line_comes("shell", "up")
    await node.stop("shell", "preempted", grace_ms=10_000)
    assert (await node.ends("shell")).outcome == "preempted"
    assert sorted(await node.lines("shell")) == ["inner", "shell", "up"]


async def test_what_a_rank_needs_to_save_is_not_told_to_stop(node: LauncherNode) -> None:
    script = """
import subprocess, sys
from stoker import training
helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print("up", flush=True)
while not training.should_stop():
    pass
print("helper says", helper.communicate("still here")[0], flush=True)
"""
    await node.place("helped", {"train.py": script}, gpus=1, allocations=(node.allocation(0, 1),))
    await node.line_comes("helped", "up")
    await node.stop("helped", "preempted", grace_ms=10_000)
    assert (await node.ends("helped")).outcome == "preempted"
    assert (await node.lines("helped"))[-1] == "helper says still here"


async def test_what_breaks_within_the_grace_is_no_preemption(node: LauncherNode) -> None:
    await node.place("breaks", {"train.py": BREAKS}, gpus=1, allocations=(node.allocation(0, 1),))
    await node.line_comes("breaks", "up")
    await node.stop("breaks", "preempted", grace_ms=10_000)
    ended = await node.ends("breaks")
    assert (ended.outcome, ended.asked, ended.before_stop, ended.failed) == ("oom", "preempted", (), True)
    assert ended.ranks[0].error_type == "RuntimeError"


@pytest.mark.parametrize("reason", ["preempted", "deadline"])
async def test_a_job_that_finishes_within_the_grace_has_finished(node: LauncherNode, reason: str) -> None:
    job = f"done-{reason}"
    await node.place(job, {"train.py": DONE})
    await node.line_comes(job, "up", 0)
    await node.line_comes(job, "up", 1)
    await node.stop(job, reason, grace_ms=10_000)
    ended = await node.ends(job)
    assert (ended.outcome, ended.asked, ended.before_stop) == ("ok", reason, ())
    assert await node.lines(job) == ["up", "evaluated"]


SHARE = "import os, time\nprint(os.environ['STOKER_GPU_FRACTION'], flush=True)\ntime.sleep(60)\n"


async def test_two_attempts_on_one_gpu_come_and_go_without_each_other(node: LauncherNode) -> None:
    half = node.allocation(0, 1).model_copy(update={"milli": 500})
    code = await node.put_code({"train.py": SHARE})
    for job in ("left", "right"):
        await node.place(job, code=code, gpus=1, allocations=(half,))
        await node.line_comes(job, "0.5")
    await node.stop("left", "preempted")
    assert (await node.ends("left")).outcome == "preempted"
    held = SimulatedDevices("n1", node.data / "sim", 2).holders(half.gpus[0])
    assert held and len(held) == 1
    proof = (await node.happens(AttemptReleased, "left")).proof
    assert proof == f"process groups gone; others hold the GPUs: {held[0]}"
    assert "AttemptExited" not in await node.kinds("right")
    await node.stop("right", "cancelled")
    assert (await node.ends("right")).outcome == "cancelled"
    assert (await node.happens(AttemptReleased, "right")).proof == "process groups gone; no process holds the GPUs"


async def test_a_gpu_is_not_released_while_something_of_the_attempt_that_slipped_away_holds_it(
    node: LauncherNode,
) -> None:
    script = """
import subprocess, time
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)
"""
    await node.place("slips", {"train.py": script}, gpus=1, allocations=(node.allocation(0, 1),))
    await node.line_comes("slips", "\n")
    folder = next(node.node_dir.glob("attempts/slips-*"))
    slipped = int((folder / "rank-0.stdout").read_text())
    SimulatedDevices("n1", node.data / "sim", 2).opened(gpu_uuid("n1", 0), slipped)
    await node.stop("slips", "cancelled")
    await node.happens(AttemptExited, "slips")
    assert lives(slipped)
    assert "AttemptReleased" not in await node.kinds("slips")
    os.kill(slipped, signal.SIGKILL)
    assert (await node.happens(AttemptReleased, "slips")).proof == "process groups gone; no process holds the GPUs"


async def test_what_is_done_goes_from_the_disk_but_for_what_is_still_wanted(node: LauncherNode) -> None:
    def left(job: str) -> list[Path]:
        return [p for kind in ("ledger", "attempts") for p in (node.node_dir / kind).glob(f"{job}-*")]

    code = await node.put_code({"train.py": "print('ran')"})
    for job in ("wanted", "unwanted"):
        await node.place(job, code=code, gpus=1, allocations=(node.allocation(0, 1),))
        await node.ends(job)
    await node.withdraw("unwanted")
    await until(lambda: not left("unwanted"))
    assert left("wanted"), "its entry keeps it from being started again"
    await node.withdraw("wanted")
    await until(lambda: not left("wanted") and not (node.node_dir / "code" / code).exists())
    await node.place("again", code=code, gpus=1, allocations=(node.allocation(0, 1),))
    assert (await node.ends("again")).outcome == "ok"
