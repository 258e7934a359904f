"""A hosted service as a process: it waits for the log, says when it serves, and ends as its supervisor expects."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_chassis.jetstream import connect
from stoker_local.nats import EmbeddedNats
from stoker_proto import NodeReady
from tests.waiting import until

SERVICE = """
import asyncio, sys
from stoker_chassis.clock import stamp
from stoker_chassis.hosting import host
from stoker_chassis.settings import Settings
from stoker_proto import NodeReady

def word(text):
    return stamp(NodeReady(node="n1", boot_epoch="b", rule="r", reason=text), "test")

async def main(bus, ready):
    if sys.argv[1] == "fails":
        raise RuntimeError("something broke")
    await bus.log.append(word("serving"))
    ready()
    while sys.argv[1] == "deaf":
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
    try:
        await asyncio.Event().wait()
    finally:
        if sys.argv[1] != "quiet":
            await bus.log.append(word("last words"))

host("test", Settings(), main)
"""


def start(tmp_path: Path, url: str, what: str, lifeline: int | None = None) -> subprocess.Popen[bytes]:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    env = os.environ | {"STOKER_NATS_URL": url, "STOKER_READY_FILE": str(tmp_path / "run" / "ready")}
    if lifeline is not None:
        env |= {"STOKER_LIFELINE_FD": str(lifeline)}
    kept = () if lifeline is None else (lifeline,)
    with (tmp_path / "stderr").open("wb") as err:
        return subprocess.Popen([sys.executable, str(script), what], env=env, stderr=err, pass_fds=kept)


async def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return await asyncio.to_thread(process.wait, 15)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


async def words(server: EmbeddedNats) -> list[str]:
    async with connect(server.url, "test") as bus:
        return [r.event.reason async for r in bus.log.read() if isinstance(r.event, NodeReady)]


@pytest.mark.parametrize(("what", "code"), [("serves", 0), ("deaf", 1)])
async def test_no_service_outlives_its_supervisor_even_one_that_will_not_stop(
    tmp_path: Path, nats_server: EmbeddedNats, what: str, code: int
) -> None:
    reader, writer = os.pipe()
    process = start(tmp_path, nats_server.url, what, reader)
    os.close(reader)
    await until((tmp_path / "run" / "ready").exists, 15)
    os.close(writer)
    assert await ended(process) == code


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
async def test_a_service_stops_cleanly_when_told(tmp_path: Path, nats_server: EmbeddedNats, by: signal.Signals) -> None:
    process = start(tmp_path, nats_server.url, "serves")
    await until((tmp_path / "run" / "ready").exists, 15)
    process.send_signal(by)
    assert await ended(process) == 0
    assert await words(nats_server) == ["serving", "last words"]


async def test_a_service_stops_cleanly_also_when_the_log_is_away(tmp_path: Path, nats_server: EmbeddedNats) -> None:
    process = start(tmp_path, nats_server.url, "quiet")
    await until((tmp_path / "run" / "ready").exists, 15)
    await nats_server.stop()
    process.terminate()
    assert await ended(process) == 0


async def test_a_service_that_fails_says_why_and_exits_with_one(tmp_path: Path, nats_server: EmbeddedNats) -> None:
    assert await ended(start(tmp_path, nats_server.url, "fails")) == 1
    assert "RuntimeError: something broke" in (tmp_path / "stderr").read_text()
    assert not (tmp_path / "run" / "ready").exists()


async def test_a_service_waits_for_the_log_and_outlives_its_crash(tmp_path: Path, nats_server: EmbeddedNats) -> None:
    await nats_server.stop()
    process = start(tmp_path, nats_server.url, "serves")
    await asyncio.sleep(1)
    assert process.poll() is None
    await nats_server.start()
    await until((tmp_path / "run" / "ready").exists, 15)
    nats_server.kill9()
    await until(lambda: nats_server.restarts == 1)
    process.terminate()
    assert await ended(process) == 0
    assert await words(nats_server) == ["serving", "last words"]
