"""Snapshots as blobs, and a board that names the newest one of each service.

The newest and the one before it are kept, so that who is just reading one does not lose it; older blobs are deleted
when a new one is saved. Two leaders that save at once may leave one blob behind, which costs nothing but its space.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import zlib
from pathlib import Path

from pydantic import ValidationError

from stoker_proto import Frozen

from .eventlog import Position
from .stores import BlobStore, Board, Snapshot

log = logging.getLogger(__name__)


class _Entry(Frozen):
    """Where a snapshot lies, as the board tells it."""

    seq: int
    event_id: str
    at_ms: int
    fold: str
    state_hash: str
    blob: str
    before: str | None


class StoredSnapshots:
    """`Snapshots` in any blob store and board."""

    def __init__(self, blobs: BlobStore, board: Board) -> None:
        self._blobs = blobs
        self._board = board

    async def save(self, service: str, snapshot: Snapshot) -> None:
        old = await self._entry(service)
        with tempfile.TemporaryDirectory(prefix="stoker-snapshot-") as folder:
            path = Path(folder) / "data"
            state_hash = await asyncio.to_thread(_pack, snapshot, path)
            blob = await self._blobs.put(path)
        at = snapshot.position
        entry = _Entry(
            seq=at.seq, event_id=at.event_id, at_ms=at.at_ms, fold=snapshot.schema, state_hash=state_hash, blob=blob,
            before=old.blob if old else None,
        )  # fmt: skip
        await self._board.put(service, entry.model_dump_json().encode())
        if old and old.before and old.before not in (blob, old.blob):
            await self._blobs.delete(old.before)

    async def _entry(self, service: str) -> _Entry | None:
        raw = await self._board.get(service)
        if not raw:
            return None
        try:
            return _Entry.model_validate_json(raw)
        except ValidationError as error:
            log.warning("what the board says of the snapshot of %s cannot be read: %s", service, error)
            return None

    async def latest(self, service: str) -> Snapshot | None:
        entry = await self._entry(service)
        if entry is None:
            return None
        with tempfile.TemporaryDirectory(prefix="stoker-snapshot-") as folder:
            path = Path(folder) / "data"
            try:
                await self._blobs.get(entry.blob, path)
                snapshot = Snapshot(
                    Position(entry.seq, entry.event_id, entry.at_ms), entry.fold, await asyncio.to_thread(_unpack, path)
                )
            except KeyError:
                log.warning("the snapshot of %s at %d is gone", service, entry.seq)
                return None
            except zlib.error as error:
                log.warning("the snapshot of %s at %d is damaged: %s", service, entry.seq, error)
                return None
        if await asyncio.to_thread(lambda: snapshot.state_hash) != entry.state_hash:
            log.warning("the snapshot of %s at %d is not what was saved", service, entry.seq)
            return None
        return snapshot


def _pack(snapshot: Snapshot, path: Path) -> str:
    """Write the data, compressed: states repeat themselves, and the blob store writes through to disk."""
    path.write_bytes(zlib.compress(snapshot.data, 1))
    return snapshot.state_hash


def _unpack(path: Path) -> bytes:
    return zlib.decompress(path.read_bytes())
