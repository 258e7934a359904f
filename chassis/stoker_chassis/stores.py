"""Ports beside the log: blobs, boards (desired state), leases, telemetry, questions, snapshots."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .eventlog import EventLog, Position
from .questions import Handler

MAX_BLOB = 200 * 2**20


class BlobTooLarge(Exception):
    """A blob is larger than MAX_BLOB; the argument is its size in bytes."""


class BlobStore(Protocol):
    """Content-addressed files; the name of a blob is the SHA-256 of its content, in hex."""

    async def put(self, path: Path) -> str:
        """Store a file and return its digest; twice is the same as once. Raises BlobTooLarge over MAX_BLOB bytes."""
        ...

    async def has(self, digest: str) -> bool: ...

    async def delete(self, digest: str) -> None:
        """Forget the blob, if there is one. Who is reading it gets Unavailable."""
        ...

    async def get(self, digest: str, into: Path) -> None:
        """Write the blob to `into` atomically, verified. Raises KeyError when there is none."""
        ...


class Board(Protocol):
    """The latest value per key, watched: a projection for readers that act on state instead of commands."""

    async def put(self, key: str, value: bytes) -> None: ...

    async def get(self, key: str) -> bytes | None: ...

    async def keys(self) -> list[str]: ...

    def watch(self, key: str) -> AsyncIterator[bytes]:
        """The present value, then each change, for ever. Values in between may be skipped, the last one never is."""
        ...


class Lease(Protocol):
    """Who leads a service. It only saves work: the log's guards keep a stale leader from deciding."""

    async def acquire(self, name: str, holder: str, ttl_s: int) -> bool:
        """Take or renew the lease; true when `holder` has it."""
        ...

    async def release(self, name: str, holder: str) -> None: ...


@dataclass(frozen=True)
class Sample:
    """One telemetry message."""

    seq: int
    subject: str
    payload: bytes


class Telemetry(Protocol):
    """Log lines, metric points and device samples: bounded by age and size, never the truth."""

    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        """Publish with acknowledgement; a message id seen in the last minutes is stored once. Raises Unavailable."""
        ...

    def follow(self, subject: str, after: int = 0, wait: bool = True) -> AsyncIterator[Sample]:
        """Messages matching `subject` after a sequence, in order; with `wait` for ever, else up to the present end."""
        ...


class Questions(Protocol):
    """What one service asks another. Nothing is stored, so a question is for reading, and only events change things."""

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """The answer of one of those who serve `subject`; while nobody does, it is asked again until the time is up.

        Raises Unavailable when no answer came in time, and QuestionFailed when asking again will not help: the handler
        failed, or question or answer is larger than MAX_SAID, what a NATS message carries by default (1 MB). What can
        grow beyond that is asked for in pages.
        """
        ...

    async def answer(self, subject: str, handler: Handler) -> None:
        """Serve `subject` for ever. Several instances may: each question goes to one of them. Several questions are
        answered at once if the handler awaits; one that raises is logged, and told to the asker.
        """
        ...


@dataclass(frozen=True)
class Snapshot:
    """What a fold knows at `position` of the log, as bytes that code of the same `schema` can load."""

    position: Position
    schema: str
    data: bytes

    @property
    def state_hash(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class Snapshots(Protocol):
    """The newest snapshot of each service. Only a cache: without it a service folds the log from its beginning."""

    async def save(self, service: str, snapshot: Snapshot) -> None:
        """Make this the newest one. Raises Unavailable or BlobTooLarge."""
        ...

    async def latest(self, service: str) -> Snapshot | None:
        """The newest one; None when there is none, or it did not come back as it was. Raises Unavailable."""
        ...


@dataclass(frozen=True)
class Bus:
    """Everything a service shares with the others."""

    log: EventLog
    blobs: BlobStore
    assignments: Board
    lease: Lease
    telemetry: Telemetry
    questions: Questions
    snapshots: Snapshots
