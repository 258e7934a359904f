"""How a leading service starts from its newest snapshot, and leaves new ones behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol, runtime_checkable

from .eventlog import START, EventLog, Position, Unavailable
from .stores import BlobTooLarge, Snapshot, Snapshots

EVERY = 50_000
WORTH_IT = 1_000
LAST_S = 4.0
log = logging.getLogger(__name__)


@runtime_checkable
class Snapshotting(Protocol):
    """A core whose state can be kept and loaded again.

    `schema` names the version of the fold: code that folds differently, or dumps differently, changes it.
    """

    @property
    def schema(self) -> str: ...

    def dump(self) -> bytes:
        """All that was folded. Called in the loop, so it should be quick."""
        ...

    def load(self, data: bytes) -> None:
        """Replace the state by what was dumped; or raise, whatever is wrong, and leave it as it was."""
        ...


async def resume(log_: EventLog, snapshots: Snapshots, service: str, core: Snapshotting) -> Position:
    """Load the newest snapshot and say where to go on; START when there is none that fits this code and this log."""
    began = time.monotonic()
    try:
        snapshot = await snapshots.latest(service)
        if snapshot is None:
            return START
        if snapshot.schema != core.schema:
            log.warning("%s: a snapshot of fold %s does not fit %s", service, snapshot.schema, core.schema)
            return START
        if not await _holds(log_, snapshot.position):
            log.warning("%s: the snapshot at %d is of another log", service, snapshot.position.seq)
            return START
        core.load(snapshot.data)
    except Exception:
        # Whatever it is, the log itself still tells everything.
        log.warning("%s: the snapshot cannot be used; folding from the beginning", service, exc_info=True)
        return START
    log.info("%s: from a snapshot at %d, in %.2f s", service, snapshot.position.seq, time.monotonic() - began)
    return snapshot.position


async def _holds(log_: EventLog, position: Position) -> bool:
    """Whether the log still holds the event that the snapshot was taken at."""
    async for recorded in log_.read(position.seq - 1):
        return recorded.seq == position.seq and recorded.envelope.id == position.event_id
    return False


class Keeper:
    """Saves a snapshot every so many events, in a task, and a last one at the end when that is worth it."""

    def __init__(self, snapshots: Snapshots, service: str, core: Snapshotting, at: Position, every: int) -> None:
        self._snapshots = snapshots
        self._service = service
        self._core = core
        self._saved = at.seq
        self._every = every
        self._saving: asyncio.Task[None] | None = None

    def consider(self, at: Position) -> None:
        """Called when everything up to `at` has been folded."""
        if at.seq - self._saved >= self._every and (self._saving is None or self._saving.done()):
            self._saving = self._begin(at)

    def _begin(self, at: Position) -> asyncio.Task[None]:
        self._saved = at.seq  # also when it fails: the next one will do
        began = time.monotonic()
        snapshot = Snapshot(at, self._core.schema, self._core.dump())
        log.info("%s: dumped %d bytes in %.2f s", self._service, len(snapshot.data), time.monotonic() - began)
        return asyncio.create_task(self._save(snapshot))

    async def _save(self, snapshot: Snapshot) -> None:
        try:
            await self._snapshots.save(self._service, snapshot)
        except (Unavailable, BlobTooLarge, OSError) as error:
            log.warning("%s: no snapshot at %d: %s", self._service, snapshot.position.seq, error)

    async def close(self, at: Position, *, last: bool) -> None:
        """Wait a moment for the one under way, and for a `last` one if enough has happened since."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                if self._saving:
                    await self._saving
                if last and at.seq - self._saved >= WORTH_IT:
                    await self._begin(at)
