"""What the warm worker promises: forks once per key, true exits, whole groups killed, nothing outlives the lifeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stoker_chassis.warm import Exit, WarmWorker, WarmWorkerGone
from tests.waiting import until as until_within


@dataclass
class Worker:
    client: WarmWorker
    process: subprocess.Popen[bytes]
    lifeline: int
    folder: Path

    async def run(self, key: str, code: str, **env: str) -> int:
        script = self.folder / f"{key}.py"
        script.write_text(code)
        return await self.client.spawn(
            key, script=script, env={"PATH": os.environ["PATH"]} | env, cwd=self.folder,
            stdout=self.folder / f"{key}.out", stderr=self.folder / f"{key}.err",
            error_file=self.folder / f"{key}.error", exit_file=self.folder / f"{key}.exit",
        )  # fmt: skip

    async def ended(self, key: str) -> Exit:
        await until(lambda: (self.folder / f"{key}.exit").exists())
        status = await self.client.poll(key)
        assert status.exit is not None
        return status.exit

    def out(self, key: str) -> str:
        path = self.folder / f"{key}.out"
        return path.read_text() if path.exists() else ""


async def until(condition: Callable[[], bool]) -> None:
    await until_within(condition, 20)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    reader, writer = os.pipe()
    socket = tmp_path / "warm.sock"
    argv = [sys.executable, "-m", "stoker_chassis.forkserver", "--socket", str(socket), "--preload", "decimal"]
    process = subprocess.Popen(argv, env=os.environ | {"STOKER_LIFELINE_FD": str(reader)}, pass_fds=(reader,))
    os.close(reader)
    client = WarmWorker(socket)
    await client.ready(20)
    yield Worker(client, process, writer, tmp_path)
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        os.close(writer)


async def test_a_script_runs_with_the_preloaded_modules_and_exactly_the_given_environment(worker: Worker) -> None:
    await worker.run("a", "import sys, os; print('decimal' in sys.modules, sorted(os.environ))", GREETING="hello")
    assert await worker.ended("a") == Exit(0, None)
    assert worker.out("a") == "True ['GREETING', 'PATH']\n"


async def test_the_same_key_forks_only_once(worker: Worker) -> None:
    first = await worker.run("a", "print('once')")
    assert await worker.run("a", "print('once')") == first
    await worker.ended("a")
    assert await worker.run("a", "print('once')") == first
    assert worker.out("a") == "once\n"


async def test_an_exception_leaves_its_traceback_without_our_own_frames(worker: Worker) -> None:
    await worker.run("a", "def load():\n    raise ValueError('no such file')\nload()\n")
    assert await worker.ended("a") == Exit(1, None)
    told = json.loads((worker.folder / "a.error").read_text())
    assert (told["type"], told["message"]) == ("ValueError", "no such file")
    shown = (worker.folder / "a.err").read_text()
    assert shown.splitlines()[-1] == "ValueError: no such file"
    assert "forkserver" not in shown
    assert "runpy" not in shown


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("raise SystemExit('why')", 1), ("", 0)])
async def test_exit_codes_are_those_of_plain_python(worker: Worker, code: str, expected: int) -> None:
    await worker.run("a", code)
    assert await worker.ended("a") == Exit(expected, None)


@pytest.mark.parametrize("group", [True, False])
async def test_a_signal_that_comes_right_after_the_fork_is_not_lost(worker: Worker, group: bool) -> None:
    for number in range(25):
        await worker.run(f"a{number}", "import time; time.sleep(60)")
        assert await worker.client.kill(f"a{number}", signal.SIGTERM, group=group)
    for number in range(25):
        assert await worker.ended(f"a{number}") == Exit(None, signal.SIGTERM)


async def test_a_child_can_be_signalled_without_what_it_started(worker: Worker) -> None:
    code = """
import signal, subprocess, sys
helper = subprocess.Popen(["sleep", "60"])
def save(*_):
    print("helper", helper.poll(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
signal.pause()
"""
    await worker.run("a", code)
    await until(lambda: "up" in worker.out("a"))
    assert await worker.client.kill("a", signal.SIGTERM, group=False)
    assert await worker.ended("a") == Exit(0, None)
    assert worker.out("a") == "up\nhelper None\n"
    assert not await worker.client.kill("a", signal.SIGTERM, group=False), "it was reaped"
    assert await worker.client.kill("a", signal.SIGKILL), "its helper is still there"


async def test_a_signal_is_told_as_a_signal(worker: Worker) -> None:
    await worker.run("a", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    assert await worker.ended("a") == Exit(None, signal.SIGABRT)


async def test_exit_functions_run_and_output_is_flushed(worker: Worker) -> None:
    await worker.run("a", "import atexit, sys; atexit.register(lambda: print('bye')); sys.stdout.write('no newline')")
    await worker.ended("a")
    assert worker.out("a") == "no newlinebye\n"


async def test_killing_reaches_every_process_of_the_group(worker: Worker) -> None:
    code = "import subprocess, time\np = subprocess.Popen(['sleep', '60'])\nprint(p.pid, flush=True)\ntime.sleep(60)\n"
    await worker.run("a", code)
    await until(lambda: worker.out("a").strip() != "")
    grandchild = int(worker.out("a"))
    assert await worker.client.kill("a", signal.SIGKILL)
    await worker.ended("a")
    await until(lambda: not lives(grandchild))
    assert not (await worker.client.poll("a")).group


async def test_a_command_is_executed_as_given(worker: Worker) -> None:
    await worker.client.spawn(
        "c", argv=["bash", "-c", "echo $0 $GREETING; exit 4"], env={"PATH": os.environ["PATH"], "GREETING": "hi"},
        cwd=worker.folder, stdout=worker.folder / "c.out", stderr=worker.folder / "c.err",
        exit_file=worker.folder / "c.exit",
    )  # fmt: skip
    assert await worker.ended("c") == Exit(4, None)
    assert worker.out("c") == "bash hi\n"


async def test_children_die_with_the_worker(worker: Worker) -> None:
    pid = await worker.run("a", "import time; time.sleep(60)")
    worker.process.kill()
    worker.process.wait()
    await until(lambda: not lives(pid))
    with pytest.raises(WarmWorkerGone):
        await worker.client.poll("a")


async def test_everything_ends_when_the_lifeline_ends(worker: Worker) -> None:
    pid = await worker.run("a", "import time; time.sleep(60)")
    os.close(worker.lifeline)
    await until(lambda: worker.process.poll() is not None and not lives(pid))


async def test_lines_are_written_as_they_are_printed(worker: Worker) -> None:
    await worker.run("a", "import time\nprint('here')\nprint('half', end='')\ntime.sleep(60)\n")
    await until(lambda: worker.out("a") == "here\n")
    await worker.run("b", "import time\nprint('half', end='')\ntime.sleep(60)\n", PYTHONUNBUFFERED="1")
    await until(lambda: worker.out("b") == "half")


async def test_the_script_imports_from_its_own_folder_and_python_path_only(worker: Worker) -> None:
    extra = worker.folder / "extra"
    extra.mkdir()
    await worker.run("a", "import os, sys; print(sys.path[:2], os.getcwd() in sys.path[2:])", PYTHONPATH=str(extra))
    await worker.ended("a")
    assert worker.out("a") == f"{[str(worker.folder), str(extra)]} False\n"


async def test_an_error_message_of_any_length_is_told_in_bounds(worker: Worker) -> None:
    await worker.run("a", "raise ValueError('x' * 1_000_000)")
    await worker.ended("a")
    assert (worker.folder / "a.error").stat().st_size < 10_000


async def test_what_a_job_left_behind_is_reaped_so_that_its_group_is_seen_to_end(worker: Worker) -> None:
    await worker.run("a", "import subprocess\nprint(subprocess.Popen(['sleep', '0.3']).pid)\n")
    await worker.ended("a")
    assert (await worker.client.poll("a")).group
    async with asyncio.timeout(10):
        while (await worker.client.poll("a")).group:
            await asyncio.sleep(0.02)
    assert not Path(f"/proc/{int(worker.out('a'))}").exists()
    assert not await worker.client.kill("a", signal.SIGKILL)


async def test_a_key_that_was_forgotten_may_be_used_again(worker: Worker) -> None:
    await worker.run("a", "print('once')")
    await worker.ended("a")
    await worker.client.forget("a")
    assert not (await worker.client.poll("a")).known
    (worker.folder / "a.exit").unlink()
    await worker.run("a", "print('again')")
    await worker.ended("a")
    assert worker.out("a") == "once\nagain\n"


async def test_a_running_child_is_not_forgotten(worker: Worker) -> None:
    await worker.run("a", "import time; time.sleep(60)")
    await worker.client.forget("a")
    assert (await worker.client.poll("a")).known


async def test_there_is_never_a_second_worker_on_a_socket(worker: Worker) -> None:
    before = await worker.client.identity()
    argv = [sys.executable, "-m", "stoker_chassis.forkserver", "--socket", str(worker.folder / "warm.sock")]
    second = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.DEVNULL)
    assert await second.wait() == 0
    assert await worker.client.identity() == before


async def test_only_a_worker_that_has_ended_is_called_dead(worker: Worker) -> None:
    child = await worker.run("a", "import time; time.sleep(60)")
    worker.process.send_signal(signal.SIGSTOP)
    assert not worker.client.dead()
    worker.client.end()
    worker.process.wait()
    await until(lambda: worker.client.dead() and not lives(child))


async def test_a_new_worker_is_another_one_though_it_knows_the_same_socket(worker: Worker) -> None:
    before = await worker.client.identity()
    worker.process.kill()
    worker.process.wait()
    argv = [sys.executable, "-m", "stoker_chassis.forkserver", "--socket", str(worker.folder / "warm.sock")]
    second = subprocess.Popen(argv)
    try:
        await worker.client.ready(20)
        assert await worker.client.identity() != before
    finally:
        second.kill()
        second.wait()


async def test_ranks_of_a_worker_with_numpy_and_torch_draw_different_numbers_and_take_their_threads_and_their_share(
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-m", "stoker_chassis.forkserver", "--socket", str(tmp_path / "w.sock")]
    process = subprocess.Popen([*argv, "--preload", "numpy,torch"])
    try:
        client = WarmWorker(tmp_path / "w.sock")
        await client.ready(60)
        worker = Worker(client, process, -1, tmp_path)
        code = "import numpy, torch\nprint(numpy.random.rand(), torch.get_num_threads())\n"
        await worker.run("a", code, OMP_NUM_THREADS="1")
        await worker.run("b", code, OMP_NUM_THREADS="2")
        # What waits for the first use of CUDA; opening a device before would keep the job from forking.
        share = "import torch\nprint(torch.cuda.is_initialized(), len(torch.cuda._queued_calls))\n"
        await worker.run("whole", share)
        await worker.run("part", share, STOKER_GPU_FRACTION="0.25")
        for key in ("a", "b", "whole", "part"):
            assert await worker.ended(key) == Exit(0, None)
    finally:
        process.kill()
        process.wait()
    (whole, before), (part, after) = worker.out("whole").split(), worker.out("part").split()
    assert (whole, part, int(after) - int(before)) == ("False", "False", 1)
    (first, one), (second, two) = worker.out("a").split(), worker.out("b").split()
    assert first != second
    assert (one, two) == ("1", "2")
