"""In-memory twins of every port, for tests and replay. They pass the contract suite of the real ones."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from stoker_proto import Envelope, Recorded, decode, encode

from .clock import new_id
from .eventlog import START, Appended, Burst, Conflict, Diverged, Expect, Position, Unavailable
from .questions import Handler, QuestionFailed, answered, fits
from .snapshots import StoredSnapshots
from .stores import MAX_BLOB, BlobTooLarge, Bus, Sample

BURST = 100


def wall_ms() -> int:
    return int(time.time() * 1000)


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, `>` the rest."""
    wanted, given = pattern.split("."), subject.split(".")
    for at, token in enumerate(wanted):
        if token == ">":
            return len(given) > at
        if at >= len(given) or token not in ("*", given[at]):
            return False
    return len(wanted) == len(given)


class _Bell:
    """Wakes everybody who waits for news."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class MemoryLog:
    """An `EventLog` in a list."""

    def __init__(self, now_ms: Callable[[], int] = wall_ms) -> None:
        self._records: list[Recorded] = []
        self._ids: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._now_ms = now_ms
        self._bell = _Bell()

    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        if envelope.id in self._ids:
            return Appended(self._ids[envelope.id], duplicate=True)
        if expect and self._last.get(expect.subject, 0) != expect.seq:
            raise Conflict(expect, self._last.get(expect.subject, 0))
        seq = len(self._records) + 1
        at_ms = max(self._now_ms(), self._records[-1].at_ms if self._records else 0)
        self._records.append(decode(encode(envelope), seq=seq, at_ms=at_ms))
        self._ids[envelope.id] = self._last[envelope.subject] = seq
        self._bell.ring()
        return Appended(seq)

    async def append_all(self, envelopes: Sequence[Envelope]) -> list[Appended]:
        return [await self.append(envelope) for envelope in envelopes]

    async def end(self) -> int:
        return len(self._records)

    async def last(self, subject: str) -> Recorded | None:
        seq = self._last.get(subject)
        return self._records[seq - 1] if seq else None

    async def read(self, after: int = 0, subject: str = ">") -> AsyncIterator[Recorded]:
        for recorded in self._records[after : len(self._records)]:
            if subject_matches(subject, recorded.envelope.subject):
                yield recorded

    async def follow(self, position: Position = START) -> AsyncIterator[Recorded]:
        async for burst in self.bursts(position):
            for recorded in burst.recorded:
                yield recorded

    async def bursts(self, position: Position = START, wants: frozenset[str] | None = None) -> AsyncIterator[Burst]:
        at = position.seq
        known = self._records[at - 1].envelope.id if 0 < at <= len(self._records) else ""
        if at > len(self._records) or (position.event_id and known != position.event_id):
            raise Diverged(f"the log does not hold event {position.event_id} at {at}")
        while True:
            if arrived := self._records[at : at + BURST]:
                at += len(arrived)
                found = [r for r in arrived if wants is None or r.envelope.type in wants]
                yield Burst(found, Position(at, arrived[-1].envelope.id, arrived[-1].at_ms))
            else:
                await self._bell.wait()


class MemoryBlobs:
    """A `BlobStore` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    async def put(self, path: Path) -> str:
        if path.stat().st_size > MAX_BLOB:
            raise BlobTooLarge(path.stat().st_size)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, self._folder / digest)
        return digest

    async def has(self, digest: str) -> bool:
        return (self._folder / digest).exists()

    async def delete(self, digest: str) -> None:
        (self._folder / digest).unlink(missing_ok=True)

    async def get(self, digest: str, into: Path) -> None:
        if not await self.has(digest):
            raise KeyError(digest)
        into.parent.mkdir(parents=True, exist_ok=True)
        part = into.with_name(f".{into.name}.{new_id()}.part")
        shutil.copyfile(self._folder / digest, part)
        part.replace(into)


class MemoryBoard:
    """A `Board` in a dict."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bell = _Bell()

    async def put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._bell.ring()

    async def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    async def keys(self) -> list[str]:
        return sorted(self._values)

    async def watch(self, key: str) -> AsyncIterator[bytes]:
        seen: bytes | None = None
        while True:
            value = self._values.get(key)
            if value is not None and value is not seen:
                seen = value
                yield value
            else:
                await self._bell.wait()


class MemoryLease:
    """A `Lease` by the monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[str, tuple[str, float]] = {}
        self._now_s = now_s

    async def acquire(self, name: str, holder: str, ttl_s: int) -> bool:
        owner, until = self._held.get(name, (holder, 0.0))
        if owner != holder and until > self._now_s():
            return False
        self._held[name] = (holder, self._now_s() + ttl_s)
        return True

    async def release(self, name: str, holder: str) -> None:
        if self._held.get(name, ("", 0.0))[0] == holder:
            del self._held[name]


class MemoryTelemetry:
    """`Telemetry` in a list."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._ids: set[str] = set()
        self._bell = _Bell()

    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        if message_id not in self._ids:
            self._ids.add(message_id)
            self._samples.append(Sample(len(self._samples) + 1, subject, payload))
            self._bell.ring()

    async def follow(self, subject: str, after: int = 0, wait: bool = True) -> AsyncIterator[Sample]:
        at = after
        while True:
            while at < len(self._samples):
                at += 1
                if subject_matches(subject, self._samples[at - 1].subject):
                    yield self._samples[at - 1]
            if not wait:
                return
            await self._bell.wait()


class MemoryQuestions:
    """`Questions` in a queue per subject, from which whoever serves it takes the next."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Queue[tuple[bytes, asyncio.Future[bytes]]]] = {}

    def _queue(self, subject: str) -> asyncio.Queue[tuple[bytes, asyncio.Future[bytes]]]:
        return self._asked.setdefault(subject, asyncio.Queue())

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queue(subject).put_nowait((fits(f"the question {subject}", payload), reply))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            raise Unavailable(f"no answer to {subject} within {timeout_s:g} s") from error

    async def answer(self, subject: str, handler: Handler) -> None:
        async with asyncio.TaskGroup() as answers:
            while True:
                payload, reply = await self._queue(subject).get()
                answers.create_task(self._answer(subject, handler, payload, reply))

    async def _answer(self, subject: str, handler: Handler, payload: bytes, reply: asyncio.Future[bytes]) -> None:
        if reply.done():  # nobody waits for it any more
            return
        try:
            said = await answered(subject, handler, payload)
        except QuestionFailed as failed:
            if not reply.done():
                reply.set_exception(failed)
        else:
            if not reply.done():
                reply.set_result(said)


def memory_bus(folder: Path) -> Bus:
    """A whole bus in memory, blobs in `folder`."""
    blobs = MemoryBlobs(folder)
    return Bus(
        log=MemoryLog(),
        blobs=blobs,
        assignments=MemoryBoard(),
        lease=MemoryLease(),
        telemetry=MemoryTelemetry(),
        questions=MemoryQuestions(),
        snapshots=StoredSnapshots(blobs, MemoryBoard()),
    )
