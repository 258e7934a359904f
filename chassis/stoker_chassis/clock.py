"""Time and ids for the shells; cores get both as arguments."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from ulid import ULID

from stoker_proto import Envelope, Event, seal


def new_id() -> str:
    return str(ULID())


def stamp(
    event: Event,
    source: str,
    *,
    id: str | None = None,
    actor: str | None = None,
    onbehalfof: str | None = None,
    causationid: str | None = None,
    traceparent: str | None = None,
) -> Envelope:
    """Seal an event with the present time; a derived `id` makes re-sending safe, without one it gets a fresh id."""
    return seal(
        event,
        id=id or new_id(),
        source=source,
        time=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        actor=actor or source,
        onbehalfof=onbehalfof,
        causationid=causationid,
        traceparent=traceparent,
    )


class LogClock:
    """The log's clock, carried forward by this process's own monotonic clock since the last event.

    When the log moves to a server whose clock is behind, it stands still until that one has caught up, as it does for
    folds: if it ran on, whatever happens then would look as if it had happened long ago.
    """

    def __init__(self) -> None:
        self._at_ms = 0
        self._seen = time.monotonic()

    def saw(self, at_ms: int) -> None:
        self._at_ms, self._seen = max(at_ms, self._at_ms), time.monotonic()

    def now_ms(self) -> int:
        """Milliseconds on the log's clock; meaningful once the reader has caught up."""
        return self._at_ms + int((time.monotonic() - self._seen) * 1000) if self._at_ms else 0
