"""JetStream through crashes: nothing acknowledged is lost, nothing is stored twice, no reader skips an event."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path

import pytest
from nats.errors import Error as NatsError

import nats
from stoker_chassis import jetstream, reader
from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Appended, Conflict, Diverged, EventLog, Expect, Refused, Unavailable
from stoker_chassis.jetstream import connect
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import Envelope, Recorded, subjects
from tests.builders import ready
from tests.contract.lossy_wire import lossy_wire
from tests.waiting import take, until


def event(node: str = "n1", reason: str = "passed") -> Envelope:
    return stamp(ready(node).model_copy(update={"reason": reason}), "test")


async def fill(log: EventLog, count: int) -> None:
    for start in range(0, count, 200):
        await asyncio.gather(*(log.append(event(f"n{i}")) for i in range(start, min(count, start + 200))))


class Follower:
    """Reads in the background, so that trouble meets a reader at work."""

    def __init__(self, log: EventLog) -> None:
        self.seen: list[Recorded] = []
        self._task = asyncio.create_task(self._run(log))

    async def _run(self, log: EventLog) -> None:
        async for recorded in log.follow():
            self.seen.append(recorded)

    async def reaches(self, seq: int, seconds: float = 20) -> None:
        """Wait for the event; raises what the reader raised."""
        await until(lambda: self._task.done() or len(self.seen) >= seq, seconds)
        if self._task.done():
            self._task.result()
        assert [r.seq for r in self.seen] == list(range(1, len(self.seen) + 1))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_follower_and_its_writers_survive_crashes(nats_server: EmbeddedNats, bus: Bus) -> None:
    follower = Follower(bus.log)
    stop = asyncio.Event()
    acked: dict[str, int] = {}

    async def write(name: str) -> None:
        while not stop.is_set():
            envelope = event(name)
            acked[envelope.id] = (await bus.log.append(envelope)).seq

    writers = [asyncio.create_task(write(f"w{i}")) for i in range(8)]

    async def written(more: int) -> None:
        enough = len(acked) + more
        await until(lambda: len(acked) >= enough)

    async def crash() -> None:
        before = nats_server.restarts
        nats_server.kill9()
        await until(lambda: nats_server.restarts == before + 1)

    for _ in range(2):
        await written(100)
        await crash()
    await written(100)
    stop.set()
    await asyncio.gather(*writers)
    await follower.reaches(await bus.log.end())
    await follower.stop()
    stored = {r.envelope.id: r.seq for r in follower.seen}
    assert len(stored) == len(follower.seen)
    assert stored == acked


async def test_a_follower_is_back_soon_after_a_crash(nats_server: EmbeddedNats, bus: Bus) -> None:
    follower = Follower(bus.log)
    await bus.log.append(event())
    await follower.reaches(1)
    nats_server.kill9()
    await until(lambda: nats_server.restarts == 1)
    await bus.log.append(event())
    await follower.reaches(2, seconds=2)
    await follower.stop()


async def test_a_follower_survives_the_loss_of_its_consumer(nats_server: EmbeddedNats, bus: Bus) -> None:
    nc = await nats.connect(nats_server.url)
    js = nc.jetstream()
    follower = Follower(bus.log)
    for round_ in range(1, 4):
        await fill(bus.log, 50)
        await follower.reaches(50 * round_)
        for consumer in await js.consumers_info(subjects.EVENTS):
            await js.delete_consumer(subjects.EVENTS, consumer.name)
    await fill(bus.log, 1)
    await follower.reaches(151, seconds=5)
    await follower.stop()
    await nc.close()


async def test_a_slow_reader_misses_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(reader, "BATCH", 20)
    await fill(bus.log, 200)
    writing = asyncio.create_task(fill(bus.log, 200))
    seen = []
    async for recorded in bus.log.follow():
        seen.append(recorded.seq)
        if len(seen) % 50 == 0:
            await asyncio.sleep(0.3)
        if len(seen) == 120:
            time.sleep(0.5)  # noqa: ASYNC251  a handler that blocks the whole loop for several heartbeats
        if len(seen) == 400:
            break
    await writing
    assert seen == list(range(1, 401))


async def test_readers_leave_no_consumers_behind(nats_server: EmbeddedNats, bus: Bus) -> None:
    await fill(bus.log, 3)
    for _ in range(10):
        assert len([r async for r in bus.log.read(0, "stoker.event.node.n1.>")]) == 1
    nc = await nats.connect(nats_server.url)

    async def none_left() -> bool:
        return (await nc.jetstream().stream_info(subjects.EVENTS)).state.consumer_count == 0

    await until(none_left, 5)
    await nc.close()


async def _exchange_store(server: EmbeddedNats, folder: Path, other: Path) -> None:
    """What a restored backup or a power loss does: the same address, another log."""
    await server.stop()
    shutil.rmtree(folder / "store")
    if (other / "store").exists():
        shutil.copytree(other / "store", folder / "store")
    await server.start()


@pytest.mark.parametrize("other_length", [0, 1, 3, 6])
async def test_a_follower_at_work_notices_that_the_log_is_another_one(tmp_path: Path, other_length: int) -> None:
    if other_length:
        async with EmbeddedNats(tmp_path / "other") as other, connect(other.url, "test") as bus:
            await fill(bus.log, other_length)
    async with EmbeddedNats(tmp_path / "nats") as server, connect(server.url, "test") as bus:
        await fill(bus.log, 3)
        follower = Follower(bus.log)
        await follower.reaches(3)
        await _exchange_store(server, tmp_path / "nats", tmp_path / "other")
        with pytest.raises(Diverged):
            await follower.reaches(4, seconds=8)
        assert len(follower.seen) == 3


@pytest.mark.parametrize("guarded", [True, False])
async def test_an_append_whose_answer_is_lost_lands_once(nats_server: EmbeddedNats, bus: Bus, guarded: bool) -> None:
    guard = Expect(event().subject, 0) if guarded else None
    async with lossy_wire(nats_server.url) as wire, connect(wire.url, "test") as deaf:
        wire.mute = True
        sending = asyncio.create_task(deaf.log.append(event(), guard))

        async def landed() -> bool:
            return await bus.log.end() == 1

        await until(landed)
        if guarded:  # somebody writes on top before the sender can find out
            await bus.log.append(event(), Expect(event().subject, 1))
        wire.mute = False
        assert await sending == Appended(1, duplicate=True)
    assert await bus.log.end() == (2 if guarded else 1)


async def test_an_append_that_did_not_land_before_another_is_a_conflict(nats_server: EmbeddedNats, bus: Bus) -> None:
    await bus.log.append(event())
    with pytest.raises(Conflict):
        async with asyncio.timeout(1):
            await bus.log.append(event(), Expect(event().subject, 0))


async def test_without_a_server_an_append_is_unavailable_and_readers_wait(
    nats_server: EmbeddedNats, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "APPEND_S", 0.3)
    monkeypatch.setattr(jetstream, "TRY_S", 0.2)
    follower = Follower(bus.log)
    await bus.log.append(event())
    await nats_server.stop()
    with pytest.raises(Unavailable):
        await bus.log.append(event())
    with pytest.raises(Unavailable):
        await bus.log.end()
    await nats_server.start()
    await bus.log.append(event("n2"))
    await follower.reaches(await bus.log.end())
    assert follower.seen[-1].envelope.subject == event("n2").subject
    await follower.stop()


async def test_follow_may_begin_while_the_server_is_away(nats_server: EmbeddedNats, bus: Bus) -> None:
    await bus.log.append(event())
    await nats_server.stop()
    following = asyncio.create_task(take(bus.log.follow(), 1))
    await asyncio.sleep(0.1)
    await nats_server.start()
    assert [r.seq for r in await following] == [1]


@pytest.mark.parametrize("size", [600_000, 2_000_000])
async def test_an_event_that_is_too_large_is_refused(bus: Bus, size: int) -> None:
    with pytest.raises(Refused):
        await bus.log.append(event(reason="x" * size))
    assert await bus.log.end() == 0


async def test_the_log_cannot_be_rewritten(nats_server: EmbeddedNats, bus: Bus) -> None:
    await bus.log.append(event())
    nc = await nats.connect(nats_server.url)
    js = nc.jetstream()
    with pytest.raises(NatsError):
        await js.delete_msg(subjects.EVENTS, 1)
    with pytest.raises(NatsError):
        await js.purge_stream(subjects.EVENTS)
    config = (await js.stream_info(subjects.EVENTS)).config
    assert (config.max_age, config.max_msgs, config.discard) == (0, -1, "new")
    assert await bus.log.end() == 1
    await nc.close()


async def test_a_service_that_starts_changes_no_setting_of_a_stream(nats_server: EmbeddedNats) -> None:
    nc = await nats.connect(nats_server.url)
    js = nc.jetstream()
    made = await js.add_stream(name=subjects.EVENTS, subjects=[subjects.EVENTS_SUBJECTS], duplicate_window=77)
    async with connect(nats_server.url, "test") as bus:
        await bus.log.append(event())
        assert (await js.stream_info(subjects.EVENTS)).config == made.config
    await nc.close()


async def test_services_that_start_at_once_share_what_they_make(nats_server: EmbeddedNats) -> None:
    async def start(name: str) -> int:
        async with connect(nats_server.url, name) as bus:
            return (await bus.log.append(event(name))).seq

    assert sorted(await asyncio.gather(*(start(f"s{i}") for i in range(5)))) == [1, 2, 3, 4, 5]


async def test_a_connection_is_waited_for(tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path / "nats") as server:
        await server.stop()

        async def append() -> int:
            async with connect(server.url, "early") as bus:
                return (await bus.log.append(event())).seq

        early = asyncio.create_task(append())
        await asyncio.sleep(0.3)
        await server.start()
        assert await early == 1


async def test_watches_and_telemetry_go_on_after_a_crash(nats_server: EmbeddedNats, bus: Bus) -> None:
    watching, following = bus.assignments.watch("n1"), bus.telemetry.follow("stoker.device.*")
    await bus.assignments.put("n1", b"before")
    assert await take(watching, 1) == [b"before"]
    for i in range(20):
        await bus.telemetry.publish("stoker.device.n1", b"before", f"a{i}")
    await take(following, 20)
    nats_server.kill9()
    await until(lambda: nats_server.restarts == 1)
    await bus.assignments.put("n1", b"after")
    assert (await take(watching, 1))[-1] == b"after"

    heard = asyncio.Event()

    async def telling() -> None:
        """A crash may take telemetry's last moments, and what replaces them may reuse their places."""
        while not heard.is_set():  # no cancellation: the client could swallow it
            await bus.telemetry.publish("stoker.device.n1", b"after", stamp(ready("n1"), "t").id)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(telling())
    assert (await take(following, 1))[0].payload == b"after"
    heard.set()
    await task


async def test_a_blob_is_fetched_whole_through_a_crash(nats_server: EmbeddedNats, bus: Bus, tmp_path: Path) -> None:
    content = random.Random(3).randbytes(30 * 2**20)
    (tmp_path / "in").write_bytes(content)
    digest = await bus.blobs.put(tmp_path / "in")
    folder = tmp_path / "cache"
    fetching = asyncio.create_task(bus.blobs.get(digest, folder / "out"))
    await until(lambda: any(path.stat().st_size for path in folder.glob(".out.*")))
    nats_server.kill9()
    async with asyncio.timeout(15):
        await fetching
    assert (folder / "out").read_bytes() == content
    assert len(list(folder.iterdir())) == 1


async def test_a_lease_outlives_a_crash_of_the_server_but_not_of_its_holder(
    nats_server: EmbeddedNats, bus: Bus
) -> None:
    assert await bus.lease.acquire("scheduler", "a", 3)
    nats_server.kill9()
    await until(lambda: nats_server.restarts == 1)
    assert not await bus.lease.acquire("scheduler", "b", 3)
    await until(lambda: bus.lease.acquire("scheduler", "b", 3), 8)
