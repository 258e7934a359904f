"""The embedded nats-server: one owner per store, the same address after every restart, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_chassis.clock import stamp
from stoker_chassis.jetstream import connect
from stoker_local.nats import EmbeddedNats
from stoker_proto import ProblemError
from tests.builders import ready
from tests.waiting import until


async def append(server: EmbeddedNats) -> int:
    async with connect(server.url, "test") as bus:
        return (await bus.log.append(stamp(ready("n1"), "test"))).seq


async def test_a_second_owner_of_a_store_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path) as server:
        assert await append(server) == 1
        with pytest.raises(ProblemError, match=f"Process {os.getpid()} already runs an event log"):
            async with EmbeddedNats(tmp_path):
                pass
        assert await append(server) == 2
    async with EmbeddedNats(tmp_path) as server:
        assert await append(server) == 3


async def test_a_killed_server_comes_back_at_its_address_with_its_log(tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path) as server:
        url = server.url
        await append(server)
        server.kill9()
        await until(lambda: server.restarts == 1)
        assert server.url == url
        assert await append(server) == 2


async def test_the_address_is_kept_over_a_stop(tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path) as server:
        url = server.url
        await append(server)
    async with EmbeddedNats(tmp_path) as server:
        assert server.url == url
        assert await append(server) == 2


async def test_every_write_is_synced_and_only_this_machine_is_served(tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path):
        config = (tmp_path / "server.conf").read_text()
    assert "sync_interval: always" in config
    assert 'listen: "127.0.0.1:' in config


async def test_a_server_that_cannot_start_says_why_and_gives_the_store_back(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(ProblemError, match="did not come up"):
        async with EmbeddedNats(tmp_path):
            pass
    (tmp_path / "store").unlink()
    async with EmbeddedNats(tmp_path) as server:
        assert await append(server) == 1


OWNER = """
import asyncio, sys
from pathlib import Path
from stoker_local.nats import EmbeddedNats

async def main():
    async with EmbeddedNats(Path(sys.argv[1])) as server:
        print(server.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_server_goes_with_its_owner_even_when_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    await until(lambda: not _alive(pid))
    async with EmbeddedNats(tmp_path) as server:
        assert await append(server) == 1


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
