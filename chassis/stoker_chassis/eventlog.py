"""The `EventLog` port: one totally ordered, durable log of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stoker_proto import Envelope, Recorded


@dataclass(frozen=True)
class Expect:
    """A guard on an append: the last sequence on `subject` (an exact subject) must be `seq`; 0 means none yet."""

    subject: str
    seq: int


@dataclass(frozen=True)
class Appended:
    """Where an event lies. `duplicate` is true when an event with this id already lay there."""

    seq: int
    duplicate: bool = False


class LogError(Exception):
    """The log did not do what was asked.

    LogError
     +-- Conflict      the guard did not hold: somebody wrote first; read again and decide again
     +-- Unavailable   the log could not be reached or did not answer in time; the same append may be tried again
     +-- Refused       the log will never take this event (too large, not permitted)
     +-- Diverged      the log is not the one that the reader's checkpoint came from; rebuild
    """


class Conflict(LogError):
    def __init__(self, expect: Expect, actual: int) -> None:
        super().__init__(f"last sequence on {expect.subject} is {actual}, not {expect.seq}")
        self.expect = expect
        self.actual = actual


class Unavailable(LogError):
    pass


class Refused(LogError):
    pass


class Diverged(LogError):
    pass


@dataclass(frozen=True)
class Position:
    """How far a reader has come: sequence and id of the last event it handled, and the log's clock there.

    An empty id is not checked. The clock is for folds that go on from here: without it, one that ran back since would
    run back for them too.
    """

    seq: int = 0
    event_id: str = ""
    at_ms: int = 0


START = Position()


class Burst(NamedTuple):
    """Events that arrived together: the wanted ones, and how far the log was read with them, the unwanted included."""

    recorded: list[Recorded]
    position: Position


class EventLog(Protocol):
    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        """Append once, even when an answer is lost: the envelope's id makes retries safe.

        Raises Conflict, Unavailable (after retries of several seconds) or Refused.
        """
        ...

    async def append_all(self, envelopes: Sequence[Envelope]) -> list[Appended]:
        """Append events of which none depends on another, cheaper than one by one; each once, as `append` does.

        Raises Unavailable or Refused, and some may lie in the log then.
        """
        ...

    async def end(self) -> int:
        """The sequence of the last event; 0 when the log is empty."""
        ...

    async def last(self, subject: str) -> Recorded | None:
        """The last event on exactly this subject."""
        ...

    def read(self, after: int = 0, subject: str = ">") -> AsyncIterator[Recorded]:
        """Events after `after` that match `subject` (NATS wildcards), up to the end at the time of the call."""
        ...

    def follow(self, position: Position = START) -> AsyncIterator[Recorded]:
        """Every event after `position`, in order, without a gap, for ever; waits for new ones.

        Survives server restarts, deleted consumers and slow callers. Raises Diverged.
        """
        ...

    def bursts(self, position: Position = START, wants: frozenset[str] | None = None) -> AsyncIterator[Burst]:
        """The same for folds, which come from far and need some types only (None: all).

        What is not wanted is checked for gaps and counted, but not decoded. Never waits to make a burst larger, and a
        burst without a wanted event still tells how far the log was read.
        """
        ...
