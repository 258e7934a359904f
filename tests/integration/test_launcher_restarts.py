"""kill -9 of a launcher or its warm worker at any moment: nothing starts twice, no line is lost, every end is told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from stoker_chassis.jetstream import connect
from stoker_local.nats import EmbeddedNats
from stoker_proto import AttemptExited, AttemptPrepared, AttemptStarted, CheckpointSaved, NodeJoined, subjects
from tests.integration.launcher_node import LauncherNode, launched, lives, until

SEED = int(os.environ.get("CHAOS_SEED", "20261201"))
COUNTING = """
import os, time
from stoker import training
rank = os.environ["RANK"]
with open(f"{training.checkpoint_dir()}/started-{rank}", "a") as file:
    file.write("started\\n")
for n in range(150):
    print(f"line {n}", end="\\r\\n" if n % 3 else "\\n", flush=True)
    if rank == "0":
        training.log(n, loss=float(n))
    time.sleep(0.01)
"""


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[LauncherNode]:
    async with (
        EmbeddedNats(tmp_path / "nats", sync_interval="10s") as server,
        connect(server.url, "test") as bus,
        launched(bus, server.url, tmp_path / "data") as node,
    ):
        yield node


@pytest.mark.parametrize("number", range(4))
async def test_a_launcher_killed_at_any_moment_adopts_what_runs(node: LauncherNode, number: int) -> None:
    chance = random.Random(f"{SEED}-{number}")
    await node.place("job", {"train.py": COUNTING}, outputs={"checkpoints": {}})
    await asyncio.sleep(chance.choice((0.0, chance.uniform(0, 0.1))))
    for _ in range(3):
        await node.restart()
        await asyncio.sleep(chance.uniform(0, 0.6))
    ended = await node.ends("job")
    assert (ended.outcome, ended.asked) == ("ok", None)
    for rank in (0, 1):
        mark = node.data / "checkpoints" / "job" / f"started-{rank}"
        assert mark.read_text() == "started\n"
        assert await node.lines("job", rank) == [f"line {n}" for n in range(150)]
    points = [p.step for b in await node.points("job") for p in b.points]
    assert points == list(range(150))
    kinds = await node.kinds("job")
    for once in ("AttemptPrepared", "AttemptStarted", "AttemptExited", "AttemptReleased", "LogsSealed"):
        assert kinds.count(once) == 1, kinds
    joined = [r async for r in node.bus.log.read(0, subjects.node_event("n1", "joined"))]
    assert len(joined) == 1
    assert isinstance(joined[0].event, NodeJoined)


async def test_an_end_that_came_while_the_launcher_was_down_is_told(node: LauncherNode) -> None:
    script = """
import os, time
from stoker import training
print("up", flush=True)
time.sleep(0.5)
if os.environ["RANK"] == "0":
    training.save(3, lambda folder: (folder / "model").touch())
raise LookupError("gone wrong")
"""
    await node.place("job", {"train.py": script}, outputs={"checkpoints": {}})
    await node.line_comes("job", "up")
    node.kill()
    await until(lambda: len(list(node.node_dir.glob("attempts/job-*/rank-*.exit"))) == 2)
    await node.start()
    ended = await node.ends("job")
    assert (ended.outcome, sorted(ended.before_stop)) == ("user_error", [0, 1])
    assert {r.error_type for r in ended.ranks} == {"LookupError"}
    assert (await node.happens(CheckpointSaved, "job")).step == 3


async def test_a_launcher_killed_within_the_grace_still_knows_that_it_had_asked(node: LauncherNode) -> None:
    script = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), print("saved", flush=True), sys.exit(0)))
print("up", flush=True)
time.sleep(60)
"""
    await node.place("job", {"train.py": script})
    await node.line_comes("job", "up", 0)
    await node.line_comes("job", "up", 1)
    await node.stop("job", "preempted", grace_ms=20_000)
    await until(lambda: bool(list(node.node_dir.glob("attempts/job-*/rank-1.exit"))))
    await node.restart()
    ended = await node.ends("job")
    assert (ended.outcome, ended.asked, ended.before_stop) == ("preempted", "preempted", ())
    assert await node.lines("job") == ["up", "saved"]


async def test_a_stop_that_came_while_the_launcher_was_down_is_obeyed(node: LauncherNode) -> None:
    await node.place("job", {"train.py": "import time\nprint('up', flush=True)\ntime.sleep(60)\n"})
    await node.line_comes("job", "up")
    node.kill()
    await node.stop("job", "cancelled", grace_ms=1000)
    await node.start()
    assert (await node.ends("job")).outcome == "cancelled"


async def test_a_dead_warm_worker_ends_its_attempts_and_another_one_takes_its_place(node: LauncherNode) -> None:
    script = "import subprocess\np = subprocess.Popen(['sleep', '60'])\nprint(p.pid, flush=True)\np.wait()\n"
    await node.place("job", {"train.py": script})
    await node.line_comes("job", "\n", 0)
    await node.line_comes("job", "\n", 1)
    os.kill(node.worker_pid(), signal.SIGKILL)
    ended = await node.ends("job")
    assert (ended.outcome, ended.asked) == ("infra_node", None)
    for rank in (0, 1):
        assert not lives(int((await node.lines("job", rank))[0])), "what its ranks had started is ended too"
    await node.place("next", {"train.py": "print('ran')"})
    assert (await node.ends("next")).outcome == "ok"


async def test_after_launcher_and_worker_both_died_nothing_is_started_again(node: LauncherNode) -> None:
    await node.place("job", {"train.py": COUNTING}, outputs={"checkpoints": {}})
    await node.line_comes("job", "line 5")
    node.kill()
    os.kill(node.worker_pid(), signal.SIGKILL)
    await node.start()
    assert (await node.ends("job")).outcome == "infra_node"
    assert (node.data / "checkpoints" / "job" / "started-0").read_text() == "started\n"


async def test_a_worker_that_only_hangs_is_not_taken_for_dead(node: LauncherNode) -> None:
    await node.place("job", {"train.py": COUNTING}, outputs={"checkpoints": {}})
    await node.line_comes("job", "line 5")
    os.kill(node.worker_pid(), signal.SIGSTOP)
    await node.line_comes("job", "line 149", 0)
    await node.line_comes("job", "line 149", 1)
    await asyncio.sleep(1.2)  # longer than it takes to look after the worker
    assert "AttemptExited" not in await node.kinds("job")
    os.kill(node.worker_pid(), signal.SIGCONT)
    assert (await node.ends("job")).outcome == "ok"


async def test_a_launcher_that_comes_back_while_its_worker_still_warms_up_waits_for_that_one(
    node: LauncherNode,
) -> None:
    node.kill()
    os.kill(node.worker_pid(), signal.SIGKILL)
    slow = node.data / "slow"
    slow.mkdir()
    (slow / "warming.py").write_text(
        f"import os, time\nopen({str(slow)!r} + f'/{{os.getpid()}}', 'w')\ntime.sleep(3)\n"
    )
    node.settings |= {"STOKER_PRELOAD": "warming", "PYTHONPATH": str(slow)}
    starting = asyncio.create_task(node.start())
    await until(lambda: len(list(slow.iterdir())) > 1)
    starting.cancel()
    node.kill()
    await node.start()
    assert [int(p.name) for p in slow.iterdir() if p.name.isdigit()] == [node.worker_pid()]
    await node.place("job", {"train.py": "print('ran')"})
    assert (await node.ends("job")).outcome == "ok"


async def test_a_node_tells_what_it_has_and_its_labels_anew_when_they_change(node: LauncherNode) -> None:
    for labels in ("rack=r1,rail=2", "rack=r1,rail=2", '{"rack": "r2"}'):
        node.settings["STOKER_LABELS"] = labels
        await node.restart()
    joined = [r.event async for r in node.bus.log.read(0, subjects.node_event("n1", "joined"))]
    told = [e for e in joined if isinstance(e, NodeJoined)]
    assert [e.labels for e in told] == [{}, {"rack": "r1", "rail": "2"}, {"rack": "r2"}]
    assert told[0].cpus == len(os.sched_getaffinity(0))
    assert told[0].memory_bytes == psutil.virtual_memory().total


async def test_what_ran_before_a_reboot_is_forgotten(node: LauncherNode) -> None:
    await node.place("job", {"train.py": "import time\nprint('up', flush=True)\ntime.sleep(60)\n"})
    await node.line_comes("job", "up")
    node.kill()
    os.kill(node.worker_pid(), signal.SIGKILL)
    node.settings["STOKER_BOOT_EPOCH"] = "b2"
    await node.start()
    joined = [r.event async for r in node.bus.log.read(0, subjects.node_event("n1", "joined"))]
    assert [e.boot_epoch for e in joined if isinstance(e, NodeJoined)] == ["b1", "b2"]
    assert [e for e in await node.events("job") if isinstance(e, AttemptExited)] == []


async def test_attempts_go_on_and_stay_whole_while_the_log_is_away(tmp_path: Path) -> None:
    async with (
        EmbeddedNats(tmp_path / "nats") as server,
        connect(server.url, "test") as bus,
        launched(bus, server.url, tmp_path / "data") as node,
    ):
        await node.place("job", {"train.py": COUNTING}, outputs={"checkpoints": {}})
        await node.happens(AttemptStarted, "job")
        server.kill9()
        assert (await node.ends("job")).outcome == "ok"
        await node.happens(AttemptPrepared, "job")
        # Telemetry may lose its last messages with its server; the sealed streams are the truth.
        for rank in (0, 1):
            assert await node.sealed("job", f"rank-{rank}.stdout") == [f"line {n}" for n in range(150)]
