"""What the warm worker promises: forks once per key, true exits, whole groups killed, nothing outlives the lifeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stoker_chassis.warm import Exit, WarmWorker, WarmWorkerGone


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


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


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
