"""What snapshots promise, asked of the twin in memory and of JetStream alike."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stoker_chassis.eventlog import Position
from stoker_chassis.jetstream import connect
from stoker_chassis.memory import MemoryBlobs, MemoryBoard
from stoker_chassis.snapshots import StoredSnapshots
from stoker_chassis.stores import Bus, Snapshot
from stoker_local.nats import EmbeddedNats
from stoker_proto import subjects


def snapshot(seq: int, data: bytes = b"state") -> Snapshot:
    return Snapshot(Position(seq, f"e{seq}", 1_000 + seq), "fold-1", data)


async def test_the_newest_snapshot_of_each_service_comes_back_as_it_was(either_bus: Bus) -> None:
    snapshots = either_bus.snapshots
    assert await snapshots.latest("scheduler") is None
    large = snapshot(7, random.Random(1).randbytes(1_000_003))
    for each in (snapshot(3), snapshot(5, b""), large):
        await snapshots.save("scheduler", each)
        assert await snapshots.latest("scheduler") == each
    await snapshots.save("health", snapshot(4))
    assert await snapshots.latest("health") == snapshot(4)
    assert await snapshots.latest("scheduler") == large


async def test_a_snapshot_saved_twice_is_there(either_bus: Bus) -> None:
    for _ in range(4):
        await either_bus.snapshots.save("scheduler", snapshot(3))
        assert await either_bus.snapshots.latest("scheduler") == snapshot(3)


class Watched(MemoryBlobs):
    """Remembers which blobs there are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


async def test_only_the_newest_two_blobs_stay(tmp_path: Path) -> None:
    blobs = Watched(tmp_path / "blobs")
    snapshots = StoredSnapshots(blobs, MemoryBoard())
    await snapshots.save("s", snapshot(1, b"1"))
    first = blobs.names
    await snapshots.save("s", snapshot(2, b"2"))
    second = blobs.names - first
    await snapshots.save("s", snapshot(3, b"3"))
    assert len(blobs.names) == 2
    assert blobs.names & (first | second) == second


async def test_a_deleted_blob_is_gone_and_may_come_back(either_bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"content")
    digest = await either_bus.blobs.put(tmp_path / "in")
    await either_bus.blobs.delete(digest)
    await either_bus.blobs.delete(digest)
    assert not await either_bus.blobs.has(digest)
    with pytest.raises(KeyError):
        await either_bus.blobs.get(digest, tmp_path / "out")
    assert await either_bus.blobs.put(tmp_path / "in") == digest
    await either_bus.blobs.get(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"content"


@pytest.mark.parametrize("broken", [b"", b"not json", b'{"seq":1}'])
async def test_a_board_that_makes_no_sense_is_no_snapshot_and_is_written_over(tmp_path: Path, broken: bytes) -> None:
    board = MemoryBoard()
    snapshots = StoredSnapshots(MemoryBlobs(tmp_path / "blobs"), board)
    await board.put("s", broken)
    assert await snapshots.latest("s") is None
    await snapshots.save("s", snapshot(1))
    assert await snapshots.latest("s") == snapshot(1)


async def test_a_damaged_or_exchanged_or_missing_blob_is_no_snapshot(tmp_path: Path) -> None:
    snapshots = StoredSnapshots(blobs := Watched(tmp_path / "blobs"), MemoryBoard())
    await snapshots.save("s", snapshot(1, b"one"))
    (one,) = blobs.names
    await snapshots.save("s", snapshot(2, b"two"))
    (two,) = blobs.names - {one}
    whole = (tmp_path / "blobs" / two).read_bytes()
    for damaged in (whole[:-1], b"", (tmp_path / "blobs" / one).read_bytes()):
        (tmp_path / "blobs" / two).write_bytes(damaged)
        assert await snapshots.latest("s") is None
    (tmp_path / "blobs" / two).unlink()
    assert await snapshots.latest("s") is None


async def test_a_snapshot_is_there_for_a_service_that_starts_after_a_crash(nats_server: EmbeddedNats, bus: Bus) -> None:
    await bus.snapshots.save("scheduler", snapshot(9))
    nats_server.kill9()
    async with connect(nats_server.url, "later") as later:
        assert await later.snapshots.latest("scheduler") == snapshot(9)


async def test_deleting_snapshots_gives_their_space_back(nats_server: EmbeddedNats, bus: Bus) -> None:
    import nats

    for i in range(6):
        await bus.snapshots.save("s", snapshot(i, random.Random(i).randbytes(300_000)))
    nc = await nats.connect(nats_server.url)
    state = (await nc.jetstream().stream_info(f"OBJ_{subjects.BLOBS}")).state
    await nc.close()
    assert state.bytes < 2 * 330_000
