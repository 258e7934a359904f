"""A service that starts from a snapshot knows what one that folded everything knows; whatever is wrong, it folds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from stoker_chassis import resume as resuming
from stoker_chassis import service
from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Position, Unavailable
from stoker_chassis.memory import memory_bus
from stoker_chassis.service import Decision, lead
from stoker_chassis.stores import BlobTooLarge, Bus, Snapshot, Snapshots
from stoker_proto import LeaderElected, NodeJoined, NodeReady, Recorded
from tests.builders import joined, ready
from tests.waiting import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RENEW_S", 0.02)
    monkeypatch.setattr(resuming, "WORTH_IT", 5)


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


@dataclass
class Census:
    """Counts nodes in the order they came; makes each ready once. `folded` counts what this process itself folded."""

    schema: str = "census-1"
    waiting: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    last_ms: int = 0
    folded: int = 0

    def evolve(self, recorded: Recorded) -> None:
        self.folded += 1
        self.last_ms = recorded.at_ms
        match recorded.event:
            case NodeJoined(node=node):
                self.waiting[node] = recorded.seq
            case NodeReady(node=node):
                self.waiting.pop(node, None)
                self.ready[node] = recorded.seq

    def decide(self, now_ms: int) -> list[Decision]:
        return [Decision(ready(node), None, f"ready-{node}") for node in self.waiting]

    def due_ms(self, now_ms: int) -> int | None:
        return None

    def dump(self) -> bytes:
        return json.dumps([self.waiting, self.ready, self.last_ms]).encode()

    def load(self, data: bytes) -> None:
        self.waiting, self.ready, self.last_ms = json.loads(data)

    @property
    def known(self) -> tuple[dict[str, int], dict[str, int], int]:
        return self.waiting, self.ready, self.last_ms


@asynccontextmanager
async def leading(
    bus: Bus, core: Census, snapshots: Snapshots | None = None, every: int = 1_000_000
) -> AsyncIterator[asyncio.Task[None]]:
    snapshots = snapshots or bus.snapshots
    task = asyncio.ensure_future(lead(bus, "census", "x", core, snapshots=snapshots, snapshot_every=every))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def join(bus: Bus, *nodes: str) -> None:
    for node in nodes:
        await bus.log.append(stamp(joined(node), "test"))


async def all_known(bus: Bus) -> Census:
    """What one knows who folds the whole log."""
    core = Census()
    async for recorded in bus.log.read():
        core.evolve(recorded)
    return core


async def stopped_after(bus: Bus, *nodes: str) -> Census:
    """A leader that has seen these nodes join, and then stopped."""
    core = Census()
    async with leading(bus, core):
        await join(bus, *nodes)
        await until(lambda: len(core.ready) >= len(nodes))
    return core


async def test_a_snapshot_and_what_came_after_make_the_same_state_as_the_whole_log(bus: Bus) -> None:
    await stopped_after(bus, "a", "b", "c")
    at = await bus.log.end()
    await join(bus, "d")
    core = Census()
    async with leading(bus, core):
        await until(lambda: "d" in core.ready)
        await until(lambda: not core.waiting)
    end = await bus.log.end()
    assert core.folded == end - at
    assert core.known == (await all_known(bus)).known


async def test_a_leader_leaves_one_every_so_many_events_while_it_works(bus: Bus) -> None:
    core = Census()
    async with leading(bus, core, every=10):
        await join(bus, *(f"n{i}" for i in range(8)))
        await until(lambda: len(core.ready) == 8)

        async def saved() -> bool:
            return await bus.snapshots.latest("census") is not None

        await until(saved)
        first = await bus.snapshots.latest("census")
        await join(bus, *(f"m{i}" for i in range(8)))

        async def renewed() -> bool:
            return await bus.snapshots.latest("census") != first

        await until(renewed)
    assert first is not None
    assert first.position.seq >= 10


async def test_no_snapshot_is_left_when_too_little_has_happened(bus: Bus) -> None:
    await stopped_after(bus, "a")
    assert await bus.snapshots.latest("census") is None


async def test_who_does_not_lead_leaves_none(bus: Bus) -> None:
    await bus.lease.acquire("census", "somebody else", 60)
    await join(bus, *(f"n{i}" for i in range(30)))
    core = Census()
    async with leading(bus, core, every=10):
        await until(lambda: len(core.waiting) == 30)
    assert await bus.snapshots.latest("census") is None


async def test_a_leader_that_ends_by_an_error_leaves_none(bus: Bus) -> None:
    class Broken(Census):
        def decide(self, now_ms: int) -> list[Decision]:
            raise ValueError("cannot decide this")

    await join(bus, *(f"n{i}" for i in range(30)))
    async with leading(bus, Broken()) as task:
        with pytest.raises(ValueError, match="cannot decide"):
            await asyncio.wait_for(asyncio.shield(task), 5)
    assert await bus.snapshots.latest("census") is None


class Slow:
    """Snapshots that take their time."""

    def __init__(self, real: Snapshots) -> None:
        self._real = real
        self.release = asyncio.Event()
        self.begun = 0

    async def save(self, service: str, snapshot: Snapshot) -> None:
        self.begun += 1
        await self.release.wait()
        await self._real.save(service, snapshot)

    async def latest(self, service: str) -> Snapshot | None:
        return await self._real.latest(service)


async def test_saving_keeps_nothing_waiting_and_one_is_under_way_at_a_time(bus: Bus) -> None:
    core, slow = Census(), Slow(bus.snapshots)
    async with leading(bus, core, slow, every=5):
        await join(bus, *(f"n{i}" for i in range(20)))
        await until(lambda: len(core.ready) == 20)
        assert slow.begun == 1
        slow.release.set()

        async def another_begins() -> bool:
            await join(bus, f"m{await bus.log.end()}")
            return slow.begun > 1

        await until(another_begins)
    assert await bus.snapshots.latest("census") is not None


async def test_a_stop_does_not_wait_for_ever_for_a_snapshot(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "LAST_S", 0.1)
    core, slow = Census(), Slow(bus.snapshots)
    async with leading(bus, core, slow, every=5):
        await join(bus, *(f"n{i}" for i in range(20)))
        await until(lambda: slow.begun == 1)
    assert await bus.snapshots.latest("census") is None


class Trouble:
    """Snapshots that cannot be reached."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def save(self, service: str, snapshot: Snapshot) -> None:
        raise self._error

    async def latest(self, service: str) -> Snapshot | None:
        raise self._error


@pytest.mark.parametrize("error", [Unavailable("away"), BlobTooLarge(2**30), OSError("disk full")], ids=repr)
async def test_a_service_works_on_when_snapshots_cannot_be_saved_or_read(
    bus: Bus, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    core = Census()
    async with leading(bus, core, Trouble(error), every=5):
        await join(bus, *(f"n{i}" for i in range(20)))
        await until(lambda: len(core.ready) == 20)
    assert "cannot be used" in caplog.text
    assert "no snapshot at" in caplog.text


def foreign(at: Position) -> Position:
    return replace(at, event_id="another event")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param(lambda s: replace(s, schema="census-0"), "does not fit census-1", id="another fold"),
        pytest.param(lambda s: replace(s, position=foreign(s.position)), "another log", id="another event there"),
        pytest.param(lambda s: replace(s, position=replace(s.position, seq=999)), "another log", id="beyond the end"),
        pytest.param(lambda s: replace(s, data=b"?"), "cannot be used", id="data that cannot be loaded"),
    ],
)
async def test_a_snapshot_that_does_not_fit_is_ignored_with_a_warning(
    bus: Bus, wrong: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    await stopped_after(bus, "a", "b", "c")
    saved = await bus.snapshots.latest("census")
    assert saved is not None
    assert callable(wrong)
    await bus.snapshots.save("census", wrong(saved))
    await join(bus, "d")
    core = Census()
    async with leading(bus, core):
        await until(lambda: "d" in core.ready)
        await until(lambda: not core.waiting)
    assert said in caplog.text
    assert core.folded == await bus.log.end()
    assert core.known == (await all_known(bus)).known


async def test_without_its_snapshot_a_service_loses_nothing(bus: Bus, tmp_path: Path) -> None:
    await stopped_after(bus, "a", "b", "c")
    assert await bus.snapshots.latest("census") is not None
    for blob in (tmp_path / "blobs").iterdir():
        blob.unlink()
    core = Census()
    async with leading(bus, core):
        await until(lambda: len(core.ready) == 3)
    assert core.known == (await all_known(bus)).known
    assert len([r async for r in bus.log.read() if isinstance(r.event, LeaderElected)]) == 2
