"""What boards, leases, blobs and telemetry promise, asked of the twins in memory and of JetStream alike."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest

from stoker_chassis.stores import MAX_BLOB, BlobTooLarge, Bus
from tests.waiting import take, until


async def test_a_board_keeps_the_latest_value_per_key(either_bus: Bus) -> None:
    board = either_bus.assignments
    assert await board.get("n1") is None
    assert await board.keys() == []
    await board.put("n2", b"x")
    await board.put("n1.example.org", b"old")
    await board.put("n1.example.org", b"new")
    assert await board.get("n1.example.org") == b"new"
    assert await board.keys() == ["n1.example.org", "n2"]


async def test_a_watch_gives_the_present_value_and_each_change(either_bus: Bus) -> None:
    board = either_bus.assignments
    await board.put("n1", b"1")
    await board.put("n2", b"not mine")
    watching = board.watch("n1")
    assert await take(watching, 1) == [b"1"]
    await board.put("n2", b"not mine either")
    await board.put("n1", b"2")
    assert await take(watching, 1) == [b"2"]


async def test_a_watch_waits_for_a_key_that_is_not_there_yet(either_bus: Bus) -> None:
    watching = asyncio.create_task(take(either_bus.assignments.watch("n1"), 1))
    await asyncio.sleep(0)
    await either_bus.assignments.put("n1", b"1")
    assert await watching == [b"1"]


async def test_a_watch_never_misses_the_last_value(either_bus: Bus) -> None:
    watching = either_bus.assignments.watch("n1")
    await asyncio.gather(*(either_bus.assignments.put("n1", b"%d" % i) for i in range(30)))
    await either_bus.assignments.put("n1", b"last")
    seen = b""
    while seen != b"last":
        (seen,) = await take(watching, 1)


async def test_a_lease_has_one_holder_who_may_renew_it(either_bus: Bus) -> None:
    lease = either_bus.lease
    assert await lease.acquire("scheduler", "a", 10)
    assert not await lease.acquire("scheduler", "b", 10)
    assert await lease.acquire("scheduler", "a", 10)
    assert await lease.acquire("health", "b", 10)


async def test_of_many_who_ask_at_once_one_gets_the_lease(either_bus: Bus) -> None:
    got = await asyncio.gather(*(either_bus.lease.acquire("scheduler", f"h{i}", 10) for i in range(8)))
    assert sum(got) == 1


async def test_a_released_lease_is_free_at_once_and_only_its_holder_releases_it(either_bus: Bus) -> None:
    lease = either_bus.lease
    await lease.acquire("scheduler", "a", 10)
    await lease.release("scheduler", "b")
    assert not await lease.acquire("scheduler", "b", 10)
    await lease.release("scheduler", "a")
    assert await lease.acquire("scheduler", "b", 10)


async def test_a_lease_expires_also_after_it_was_renewed(either_bus: Bus) -> None:
    lease = either_bus.lease
    for _ in range(3):
        assert await lease.acquire("scheduler", "a", 1)
    assert not await lease.acquire("scheduler", "b", 1)
    await until(lambda: lease.acquire("scheduler", "b", 1), 5)
    assert not await lease.acquire("scheduler", "a", 1)


async def test_a_blob_is_named_by_its_content_and_comes_back_whole(either_bus: Bus, tmp_path: Path) -> None:
    content = random.Random(1).randbytes(1_000_003)
    (tmp_path / "in").write_bytes(content)
    digest = await either_bus.blobs.put(tmp_path / "in")
    assert digest == hashlib.sha256(content).hexdigest()
    assert await either_bus.blobs.put(tmp_path / "in") == digest
    assert await either_bus.blobs.has(digest)
    await either_bus.blobs.get(digest, tmp_path / "deep" / "er" / "out")
    assert (tmp_path / "deep" / "er" / "out").read_bytes() == content


async def test_an_empty_blob_is_a_blob(either_bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    digest = await either_bus.blobs.put(tmp_path / "in")
    await either_bus.blobs.get(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b""


async def test_a_blob_may_be_stored_and_fetched_by_many_at_once(either_bus: Bus, tmp_path: Path) -> None:
    content = random.Random(2).randbytes(400_000)
    (tmp_path / "in").write_bytes(content)
    (digest,) = set(await asyncio.gather(*(either_bus.blobs.put(tmp_path / "in") for _ in range(4))))
    folder = tmp_path / "cache"
    await asyncio.gather(*(either_bus.blobs.get(digest, folder / "out") for _ in range(4)))
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert (folder / "out").read_bytes() == content


async def test_a_missing_blob_is_a_key_error_and_leaves_nothing(either_bus: Bus, tmp_path: Path) -> None:
    digest = "0" * 64
    assert not await either_bus.blobs.has(digest)
    with pytest.raises(KeyError):
        await either_bus.blobs.get(digest, tmp_path / "cache" / "out")
    assert list((tmp_path / "cache").glob("*")) == []


async def test_a_blob_that_is_too_large_is_refused(either_bus: Bus, tmp_path: Path) -> None:
    with (tmp_path / "in").open("wb") as file:
        file.truncate(MAX_BLOB + 1)
    with pytest.raises(BlobTooLarge):
        await either_bus.blobs.put(tmp_path / "in")


async def test_telemetry_is_followed_by_subject_in_order(either_bus: Bus) -> None:
    telemetry = either_bus.telemetry
    following = telemetry.follow("stoker.log.j1.>")
    for i, job in enumerate(("j1", "j2", "j1")):
        await telemetry.publish(f"stoker.log.{job}.1.n1.0", b"%d" % i, f"m{i}")
    assert [s.payload for s in await take(following, 2)] == [b"0", b"2"]
    await telemetry.publish("stoker.log.j1.1.n1.0", b"3", "m3")
    (newest,) = await take(following, 1)
    assert (newest.seq, newest.subject, newest.payload) == (4, "stoker.log.j1.1.n1.0", b"3")


async def test_telemetry_up_to_the_present_end(either_bus: Bus) -> None:
    telemetry = either_bus.telemetry
    assert [s async for s in telemetry.follow("stoker.log.>", wait=False)] == []
    for i in range(5):
        await telemetry.publish("stoker.log.j1.1.n1.0", b"%d" % i, f"m{i}")
    await telemetry.publish("stoker.metric.j1.1", b"{}", "m5")
    assert [s.seq async for s in telemetry.follow("stoker.log.>", 2, wait=False)] == [3, 4, 5]
    assert [s.seq async for s in telemetry.follow("stoker.log.>", 99, wait=False)] == []


async def test_a_telemetry_message_sent_again_is_stored_once(either_bus: Bus) -> None:
    for _ in range(2):
        await either_bus.telemetry.publish("stoker.device.n1", b"{}", "same")
    assert [s.seq async for s in either_bus.telemetry.follow("stoker.device.*", wait=False)] == [1]
