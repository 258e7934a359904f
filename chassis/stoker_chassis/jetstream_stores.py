"""Blobs, boards, leases and telemetry on NATS JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError, ObjectNotFoundError
from nats.js.object_store import ObjectStore

from stoker_proto import subjects

from .clock import new_id
from .eventlog import Unavailable
from .reader import StreamGone, follow_stream
from .stores import MAX_BLOB, BlobTooLarge, Sample

PUBLISH_S = 10.0
GET_S = 120.0
CHUNKS = 16
TROUBLE = (NatsError, NoStreamResponseError, TimeoutError, OSError)
log = logging.getLogger(__name__)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class JetStreamBlobs:
    """A `BlobStore` in an object store: names are digests, so nothing is ever replaced while it is read."""

    def __init__(self, nc: Client, store: ObjectStore) -> None:
        self._nc = nc
        self._store = store

    async def put(self, path: Path) -> str:
        size = path.stat().st_size
        if size > MAX_BLOB:
            raise BlobTooLarge(size)
        digest = await asyncio.to_thread(sha256_of, path)
        if not await self.has(digest):
            try:
                with path.open("rb") as file:
                    await self._store.put(digest, file)
            except TROUBLE as error:
                raise Unavailable(f"blob {digest} was not stored: {error}") from error
        return digest

    async def has(self, digest: str) -> bool:
        try:
            await self._store.get_info(digest)
        except (NotFoundError, ObjectNotFoundError):
            return False
        except TROUBLE as error:
            raise Unavailable(f"blob {digest} could not be looked up: {error}") from error
        return True

    async def delete(self, digest: str) -> None:
        try:
            await self._store.delete(digest)
        except (NotFoundError, ObjectNotFoundError):
            return
        except TROUBLE as error:
            raise Unavailable(f"blob {digest} was not deleted: {error}") from error

    async def get(self, digest: str, into: Path) -> None:
        into.parent.mkdir(parents=True, exist_ok=True)
        part = into.with_name(f".{into.name}.{new_id()}.part")  # two readers of one blob must not share it
        try:
            async with asyncio.timeout(GET_S):
                # Not the client's own `get`: that needs 20 s to notice that the server was started again.
                info = await self._store.get_info(digest)
                chunks = f"$O.{subjects.BLOBS}.C.{info.nuid}"
                with part.open("wb") as file:
                    async for m in follow_stream(
                        self._nc, f"OBJ_{subjects.BLOBS}", 0, chunks, wait=False, batch=CHUNKS
                    ):
                        file.write(m.payload)
            if await asyncio.to_thread(sha256_of, part) != digest:
                raise Unavailable(f"blob {digest} arrived damaged")
            part.replace(into)
        except (NotFoundError, ObjectNotFoundError) as error:
            raise KeyError(digest) from error
        except (*TROUBLE, StreamGone) as error:
            raise Unavailable(f"blob {digest} could not be read: {error}") from error
        finally:
            part.unlink(missing_ok=True)


class JetStreamBoard:
    """A `Board` in a key-value bucket."""

    def __init__(self, nc: Client, bucket: str) -> None:
        self._nc = nc
        self._js = nc.jetstream(timeout=5)
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def put(self, key: str, value: bytes) -> None:
        try:
            await self._js.publish(self._prefix + key, value)
        except TROUBLE as error:
            raise Unavailable(f"{key} was not written: {error}") from error

    async def get(self, key: str) -> bytes | None:
        try:
            msg = await self._js.get_last_msg(self._stream, self._prefix + key)
        except NotFoundError:
            return None
        except TROUBLE as error:
            raise Unavailable(f"{key} could not be read: {error}") from error
        return msg.data

    async def keys(self) -> list[str]:
        try:
            info = await self._js.stream_info(self._stream, subjects_filter=f"{self._prefix}>")
        except TROUBLE as error:
            raise Unavailable(f"keys could not be read: {error}") from error
        return sorted(subject.removeprefix(self._prefix) for subject in info.state.subjects or {})

    async def watch(self, key: str) -> AsyncIterator[bytes]:
        while True:
            try:
                async for m in follow_stream(self._nc, self._stream, 0, self._prefix + key):
                    yield m.payload
            except StreamGone as gone:
                if gone.end is None:
                    raise Unavailable(str(gone)) from gone


class JetStreamLease:
    """A `Lease` as a key with a time to live.

    It is renewed by a plain publish with TTL and expected revision: the client's own `update` drops the TTL, and
    a lease renewed with it never expires.
    """

    def __init__(self, nc: Client, bucket: str) -> None:
        self._js = nc.jetstream(timeout=2)
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def acquire(self, name: str, holder: str, ttl_s: int) -> bool:
        owner, revision = await self._owner(name)
        if owner not in (None, holder):
            return False
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        try:
            await self._js.publish(self._prefix + name, holder.encode(), headers=headers, msg_ttl=ttl_s)
        except APIError:
            return False
        except TROUBLE as error:
            raise Unavailable(f"lease {name}: {error}") from error
        return True

    async def _owner(self, name: str) -> tuple[str | None, int]:
        try:
            msg = await self._js.get_last_msg(self._stream, self._prefix + name)
        except NotFoundError:
            return None, 0
        except TROUBLE as error:
            raise Unavailable(f"lease {name}: {error}") from error
        return (msg.data or b"").decode() or None, int(msg.seq or 0)

    async def release(self, name: str, holder: str) -> None:
        owner, revision = await self._owner(name)
        if owner == holder:
            headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
            with contextlib.suppress(APIError):
                await self._js.publish(self._prefix + name, b"", headers=headers, msg_ttl=1)


class JetStreamTelemetry:
    """`Telemetry` on a bounded stream."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._js = nc.jetstream(timeout=2)

    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        deadline = time.monotonic() + PUBLISH_S
        while True:
            try:
                await self._js.publish(subject, payload, headers={"Nats-Msg-Id": message_id})
            except TROUBLE as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"telemetry was not taken: {error}") from error
                await asyncio.sleep(0.1)
            else:
                return

    async def follow(self, subject: str, after: int = 0, wait: bool = True) -> AsyncIterator[Sample]:
        while True:
            try:
                async for m in follow_stream(self._nc, subjects.TELEMETRY, after, subject, wait=wait):
                    after = m.seq
                    yield Sample(m.seq, m.subject, m.payload)
            except StreamGone as gone:
                if gone.end is None:
                    raise Unavailable(str(gone)) from gone
                after = gone.end  # a crash took its last moments; go on with what comes now
            else:
                return
