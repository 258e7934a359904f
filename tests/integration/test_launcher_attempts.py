"""What a launcher does with the attempts it is given: on a real log, with real processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stoker_chassis.jetstream import connect
from stoker_local.nats import EmbeddedNats
from stoker_proto import (
    AttemptExited,
    AttemptPrepared,
    AttemptProgressed,
    AttemptReleased,
    AttemptStarted,
    CheckpointSaved,
    LogsSealed,
    PreflightPassed,
    seal,
)
from tests.integration.launcher_node import LauncherNode, launched, lives, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[LauncherNode, LauncherNode]]:
    folder = tmp_path_factory.mktemp("launcher")
    async with (
        EmbeddedNats(folder / "nats", sync_interval="10s") as server,
        connect(server.url, "test") as bus,
        launched(bus, server.url, folder / "data", "n1") as first,
        launched(bus, server.url, folder / "data", "n2") as second,
    ):
        yield first, second


@pytest_asyncio.fixture(loop_scope="module")
async def node(two: tuple[LauncherNode, LauncherNode]) -> LauncherNode:
    first, _ = two
    first.wanted.clear()
    return first


async def test_an_attempt_runs_to_its_end_and_everything_is_told_in_order(node: LauncherNode) -> None:
    script = """
import os, sys
from stoker import training
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], training.parameters())
print("careful", file=sys.stderr)
if os.environ["RANK"] == "0":
    training.log(0, loss=2.5)
    training.log(1, loss=float("nan"))
    training.save(2, lambda folder: (folder / "model").write_text("weights"))
"""
    await node.place(
        "whole", {"train.py": script}, args=("--fast",), parameters={"lr": 0.1}, outputs={"checkpoints": {}}
    )
    ended = await node.ends("whole")
    assert (ended.outcome, ended.asked, ended.before_stop) == ("ok", None, tuple(r.rank for r in ended.ranks))
    assert await node.lines("whole", 1) == ["rank 1 of 2 ['--fast'] {'lr': 0.1}"]
    assert await node.lines("whole", 0, "stderr") == ["careful"]
    points = [(p.key, p.value, p.step) for b in await node.points("whole") for p in b.points]
    assert points == [("loss", 2.5, 0), ("loss", "nan", 1)]
    kinds = await node.kinds("whole")
    told = [AttemptPrepared, AttemptStarted, AttemptExited, AttemptReleased, LogsSealed]
    assert [k for k in kinds if k in [t.__name__ for t in told]] == [t.__name__ for t in told]
    assert kinds.count(AttemptProgressed.__name__) == 1
    saved = await node.happens(CheckpointSaved, "whole")
    assert (saved.step, Path(saved.path).name) == (2, "step-0000000002")
    sealed = {s.stream: s for s in (await node.happens(LogsSealed, "whole")).streams}
    assert sorted(sealed) == ["rank-0.metrics", "rank-0.stderr", "rank-0.stdout", "rank-1.stderr", "rank-1.stdout"]
    assert await node.sealed("whole", "rank-1.stdout") == ["rank 1 of 2 ['--fast'] {'lr': 0.1}"]


async def test_a_command_runs_once_on_the_node_in_the_code_tree(node: LauncherNode) -> None:
    await node.place(
        "command", {"hello.txt": "hi"}, entrypoint=None, command="cat hello.txt; echo $NODE_RANK $RANK; exit 3"
    )
    ended = await node.ends("command")
    assert ended.outcome == "user_error"
    assert [(r.rank, r.code) for r in ended.ranks] == [(0, 3)]
    assert await node.lines("command") == ["hi0"]


async def test_lines_are_seen_while_the_job_runs_though_it_never_flushes(node: LauncherNode) -> None:
    await node.place("live", {"train.py": "import time\nprint('here')\ntime.sleep(60)\n"})
    deadline = time.monotonic() + 10
    while await node.lines("live") != ["here"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    await node.stop("live", "cancelled", grace_ms=0)
    assert (await node.ends("live")).outcome == "cancelled"


async def test_from_the_assignment_to_running_code_takes_a_fraction_of_a_second(node: LauncherNode) -> None:
    code = await node.put_code({"train.py": "import time\nprint(time.monotonic())\n"})
    seconds = []
    for number in range(5):
        began = time.monotonic()
        await node.place(f"quick{number}", code=code)
        await node.ends(f"quick{number}")
        printed = [(await node.lines(f"quick{number}", rank))[0] for rank in (0, 1)]
        seconds.append(max(map(float, printed)) - began)
        node.wanted.clear()
    assert sorted(seconds)[1] < 0.25, seconds


async def test_a_failing_rank_ends_its_neighbours_and_is_named_first(node: LauncherNode) -> None:
    script = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad sample")
time.sleep(60)
"""
    await node.place("broken", {"train.py": script})
    ended = await node.ends("broken")
    assert (ended.outcome, ended.asked, ended.before_stop) == ("user_error", None, (1,))
    assert ended.ranks[0].rank == 1
    assert ended.ranks[0].error_type == "ValueError"
    assert (ended.ranks[0].error or "").endswith("ValueError: bad sample")


async def test_an_endless_error_message_is_cut_and_still_reported(node: LauncherNode) -> None:
    script = "import sys\nprint('\\0' * 3_000_000, file=sys.stderr)\nraise ValueError('x' * 3_000_000)\n"
    await node.place("endless", {"train.py": script})
    ended = await node.ends("endless")
    assert (ended.outcome, ended.ranks[0].error_type) == ("user_error", "ValueError")


async def test_two_jobs_of_one_decision_with_the_same_code_both_run(node: LauncherNode) -> None:
    code = await node.put_code({"train.py": "print('ran')", **{f"m{i}.py": "x = 1\n" * 500 for i in range(200)}})
    fence = await node.bus.log.end()
    for number in range(2):
        whole = (node.allocation(0, 1, first=number),)
        await node.place(f"twin{number}", code=code, fence=fence, gpus=1, allocations=whole)
    for number in range(2):
        assert (await node.ends(f"twin{number}")).outcome == "ok"
        assert await node.lines(f"twin{number}") == ["ran"]


async def test_code_that_cannot_be_used_is_rejected_and_the_launcher_goes_on(node: LauncherNode) -> None:
    archive = node.data / "broken.tar.gz"
    archive.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\x03 this is no archive")
    await node.place("badcode", code=await node.bus.blobs.put(archive))
    await node.place("nocode", code="0" * 64)
    for job in ("badcode", "nocode"):
        ended = await node.releases(job)
        assert (ended.outcome, ended.ranks) == ("launch_rejected", ())
    await node.place("after", {"train.py": "print('ran')"})
    assert (await node.ends("after")).outcome == "ok"


async def test_what_is_to_stop_from_the_beginning_never_runs(node: LauncherNode) -> None:
    mark = node.data / "never"
    await node.place("never", {"train.py": f"open({str(mark)!r}, 'w')"}, want="stop", stop_reason="cancelled")
    ended = await node.releases("never")
    assert (ended.outcome, ended.asked) == ("cancelled", "cancelled")
    assert not mark.exists()


async def test_a_stop_gives_the_grace_that_a_rank_needs_though_its_neighbour_ends_at_once(node: LauncherNode) -> None:
    script = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
    await node.place("graceful", {"train.py": script})
    await node.line_comes("graceful", "up", 0)
    await node.line_comes("graceful", "up", 1)
    await node.stop("graceful", "preempted", grace_ms=5000)
    ended = await node.ends("graceful")
    assert (ended.outcome, ended.asked, ended.before_stop) == ("preempted", "preempted", ())
    assert await node.lines("graceful") == ["up", "saved"]


async def test_what_does_not_obey_is_killed_with_all_its_processes(node: LauncherNode) -> None:
    script = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["bash", "-c", "trap '' TERM; while true; do sleep 1; done"])
print(child.pid, flush=True)
time.sleep(60)
"""
    await node.place("stubborn", {"train.py": script}, gpus=1, allocations=(node.allocation(0, 1),))
    await node.line_comes("stubborn", "\n")
    await node.stop("stubborn", "timeout", grace_ms=200)
    ended = await node.ends("stubborn")
    assert (ended.outcome, ended.ranks[0].signal) == ("timeout", 9)
    assert not lives(int((await node.lines("stubborn"))[0]))


async def test_what_a_job_leaves_running_is_killed_before_its_gpus_are_released(node: LauncherNode) -> None:
    script = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
    await node.place("litter", {"train.py": script})
    assert (await node.releases("litter")).outcome == "ok"
    await node.ends("litter")
    assert not lives(int((await node.lines("litter"))[0]))


async def test_an_attempt_that_the_log_no_longer_knows_is_ended(node: LauncherNode) -> None:
    await node.place("orphan", {"train.py": "import time\nprint('up', flush=True)\ntime.sleep(60)\n"})
    await node.line_comes("orphan", "up")
    await node.withdraw("orphan")
    ended = await node.ends("orphan")
    assert (ended.outcome, ended.asked) == ("lost", "lost")


async def test_an_old_desired_state_is_no_news(node: LauncherNode) -> None:
    await node.place("kept", {"train.py": "import time\nprint('up', flush=True)\ntime.sleep(1)\nprint('whole')\n"})
    await node.line_comes("kept", "up")
    newest = node.seq
    kept, node.wanted, node.seq = node.wanted, {}, newest - 1
    await node.publish()
    node.wanted, node.seq = kept, newest + 1
    await node.publish()
    assert (await node.ends("kept")).outcome == "ok"


async def test_it_resumes_from_the_newest_complete_checkpoint(node: LauncherNode) -> None:
    script = "from stoker import training\nfound = training.resume()\nprint(found[0] if found else None)\n"
    for step, whole in ((5, True), (10, True), (20, False)):
        folder = node.data / "checkpoints" / "again" / f"step-{step:010d}"
        folder.mkdir(parents=True)
        if whole:
            (folder / "COMPLETE").touch()
    await node.place("again", {"train.py": script}, outputs={"checkpoints": {}})
    await node.ends("again")
    assert await node.lines("again", 1) == ["10"]
    assert (await node.happens(AttemptStarted, "again")).resume_step == 10
    assert "CheckpointSaved" not in await node.kinds("again")


async def test_a_gang_starts_when_all_its_nodes_are_prepared_and_its_preflight_passed(
    two: tuple[LauncherNode, LauncherNode],
) -> None:
    first, second = two
    first.wanted.clear()
    second.wanted.clear()
    script = """
import os
print(*(os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")))
"""
    whole = (first.allocation(0, 2), second.allocation(1, 2))
    code = await first.put_code({"train.py": script})
    fence = await first.bus.log.end()
    await first.place("gang", code=code, gpus=2, allocations=whole, preflight="required", fence=fence)
    head = await first.happens(AttemptPrepared, "gang")
    assert head.master_port is not None
    await second.place("gang", code=code, gpus=2, allocations=whole, preflight="required", fence=fence)
    await second.happens(AttemptPrepared, "gang")
    await asyncio.sleep(0.3)
    assert "AttemptStarted" not in await first.kinds("gang"), "not before its preflight"
    passed = PreflightPassed(job_id="gang", attempt=1, nodes=("n1", "n2"))
    await first.bus.log.append(seal(passed, id="passed", source="health", time="2026-01-01T00:00:00Z", actor="health"))
    for node in two:
        assert (await node.ends("gang")).outcome == "ok"
    port = head.master_port
    assert await first.lines("gang", 1) == [f"1 1 4 0 127.0.0.1 {port}"]
    assert await second.lines("gang", 2) == [f"2 0 4 1 127.0.0.1 {port}"]


async def test_a_gang_that_waits_can_be_stopped(node: LauncherNode) -> None:
    await node.place("waits", {"train.py": ""}, preflight="required")
    await node.happens(AttemptPrepared, "waits")
    await node.stop("waits", "preflight_failed")
    assert (await node.releases("waits")).outcome == "preflight_failed"


async def test_the_ledger_knows_that_all_of_it_is_done(node: LauncherNode) -> None:
    def phases() -> set[str]:
        return {json.loads(p.read_text())["phase"] for p in (node.node_dir / "ledger").glob("*.json")}

    await until(lambda: phases() == {"done"})
