"""The gateway as its own process on a real nats-server: killed, stopped and doubled, without a gap or a second job."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from stoker_chassis.clock import stamp
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import Event, JobSubmitted, LogBatch, subjects
from tests.builders import submitted
from tests.unit.gateway_api import SPEC, TOKEN
from tests.unit.test_gateway_views import finished, placed
from tests.waiting import until

SSE = {"Accept": "text/event-stream"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Process:
    """One gateway process, its address, and a client for it."""

    def __init__(self, nats_url: str, folder: Path) -> None:
        self.port = free_port()
        self.ready = folder / "ready"
        self.log = folder / "log"
        self._env = os.environ | {
            "STOKER_NATS_URL": nats_url, "STOKER_PORT": str(self.port), "STOKER_TOKEN": TOKEN,
            "STOKER_DATA_DIR": str(folder), "STOKER_READY_FILE": str(self.ready),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20
        )

    async def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        with self.log.open("ab") as out:
            argv = (sys.executable, "-m", "stoker_gateway")
            self._process = await asyncio.create_subprocess_exec(*argv, env=self._env, stdout=out, stderr=out)
        await until(lambda: self.ready.exists() or self._process.returncode is not None, 60)
        assert self._process.returncode is None, self.log.read_text()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        self._process.terminate()
        return await asyncio.wait_for(self._process.wait(), 20)


@contextlib.asynccontextmanager
async def process(server: EmbeddedNats, folder: Path) -> AsyncIterator[Process]:
    gateway = Process(server.url, folder)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.http.aclose()
        with contextlib.suppress(ProcessLookupError):
            await gateway.kill()


async def say(bus: Bus, *events: Event) -> None:
    for event in events:
        await bus.log.append(stamp(event, "test"))


async def print_lines(bus: Bus, first: int, count: int) -> None:
    lines = tuple(f"line {first + i}" for i in range(count))
    batch = LogBatch(job_id="j", attempt=1, node="n1", rank=0, stream="stdout", first=first, lines=lines)
    await bus.telemetry.publish(subjects.log("j", 1, "n1", 0), batch.model_dump_json().encode(), f"m{first}")


class Follower:
    """Reads server-sent events over as many connections as it takes, like a browser: the last id goes with each."""

    def __init__(self, gateway: Process, path: str) -> None:
        self._gateway = gateway
        self._path = path
        self.ids: list[str] = []
        self.kinds: list[str] = []

    async def run(self, last_kind: str) -> None:
        while last_kind not in self.kinds:
            headers = SSE | ({"Last-Event-ID": self.ids[-1]} if self.ids else {})
            with contextlib.suppress(httpx.TransportError):
                async with self._gateway.http.stream("GET", self._path, headers=headers) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    async for line in answer.aiter_lines():
                        field, _, value = line.partition(": ")
                        if field == "id":
                            self.ids.append(value)
                        elif field == "event":
                            self.kinds.append(value)
            await asyncio.sleep(0.05)


async def test_followers_see_everything_once_while_the_gateway_is_killed(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with process(nats_server, tmp_path / "g") as gateway:
        await say(bus, submitted("j"), placed("j", 1, "n1"))
        await print_lines(bus, 0, 3)
        events = Follower(gateway, "/v1/jobs/j/events")
        log = Follower(gateway, "/v1/events")
        lines = Follower(gateway, "/v1/jobs/j/logs?follow=1")
        following = [
            asyncio.create_task(f.run(last))
            for f, last in [(events, "stoker.job.finished.v1"), (log, "stoker.job.finished.v1"), (lines, "end")]
        ]
        await until(lambda: len(events.ids) == 2 and len(log.ids) == 2 and len(lines.ids) == 3, 20)
        for first in (3, 6):
            await gateway.kill()
            await say(bus, placed("j", first, "n1"))
            await print_lines(bus, first, 3)
            await gateway.start()
        await say(bus, finished("j", 6))
        await asyncio.wait_for(asyncio.gather(*following[::2]), 30)
        await until(lambda: len(log.ids) == 5, 20)
        following[1].cancel()
        await asyncio.gather(*following, return_exceptions=True)
    assert events.ids == log.ids == ["1", "2", "3", "4", "5"]
    assert lines.ids == [f"{batch}.{i}" for batch in (1, 2, 3) for i in range(3)]


async def test_a_key_is_one_job_across_two_gateways_a_kill_and_a_lost_read_model(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    key = {"Idempotency-Key": "trial-42"}
    async with process(nats_server, tmp_path / "a") as one, process(nats_server, tmp_path / "b") as two:
        posts = [g.http.post("/v1/jobs", json={"spec": SPEC}, headers=key) for g in [one, two] * 10]
        answers = await asyncio.gather(*posts)
        assert sorted(a.status_code for a in answers) == [200] * 19 + [201]
        job_id = answers[0].json()["job_id"]
        await one.kill()
        (tmp_path / "a" / "gateway" / "views.db").unlink()
        await one.start()
        again = await one.http.post("/v1/jobs", json={"spec": SPEC}, headers=key)
        assert (again.status_code, again.json()["job_id"]) == (200, job_id)
        other = await two.http.post("/v1/jobs", json={"spec": SPEC | {"command": "x"}}, headers=key)
        assert other.json()["code"] == "idempotency_key_reused"
        for gateway in (one, two):
            assert [j["job_id"] for j in (await gateway.http.get("/v1/jobs")).json()["jobs"]] == [job_id]
    found = [r.event async for r in bus.log.read() if isinstance(r.event, JobSubmitted)]
    assert [e.job_id for e in found] == [job_id]


async def test_it_ends_cleanly_when_told_to_though_clients_still_follow(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with process(nats_server, tmp_path / "g") as gateway:
        await say(bus, submitted("j"))
        follower = Follower(gateway, "/v1/jobs/j/events")
        following = asyncio.create_task(follower.run("never"))
        await until(lambda: follower.ids == ["1"], 20)
        assert await gateway.stop() == 0, gateway.log.read_text()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert "Traceback" not in gateway.log.read_text()


async def test_positions_beyond_the_log_are_refused_or_empty_and_never_hang(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with process(nats_server, tmp_path / "g") as gateway:
        await say(bus, submitted("j"))
        for path in ("/v1/events?after=99", "/v1/jobs/j/events?after=99"):
            for headers in ({}, SSE):
                refused = await gateway.http.get(path, headers=headers, timeout=5)
                assert (refused.status_code, refused.json()["facts"]) == (422, {"end": 1})
        ahead = await gateway.http.get("/v1/jobs/j/logs", params={"after": "99.0"}, timeout=5)
        assert (ahead.status_code, ahead.text) == (200, "")


async def test_code_of_many_megabytes_goes_in_by_pieces(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 24
    digest = hashlib.sha256(content).hexdigest()
    async with process(nats_server, tmp_path / "g") as gateway:
        assert (await gateway.http.put(f"/v1/blobs/{digest}", content=content)).status_code == 201
        assert (await gateway.http.head(f"/v1/blobs/{digest}")).status_code == 200
        assert (await gateway.http.head(f"/v1/blobs/{'0' * 64}")).status_code == 404
