"""The envelope around every event: a CloudEvents 1.0 message in structured JSON, and its place in the log."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation


class Frozen(BaseModel):
    """A value: never changed after it was made. Unknown fields are skipped, so old readers meet new writers."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Event(Frozen):
    """The data of one event. `type_name` is its CloudEvents type, with the version of its schema at the end."""

    type_name: ClassVar[str]
    writer: ClassVar[str]

    def subject(self) -> str:
        """The log subject that this event is published on."""
        raise NotImplementedError


class Unknown(Event):
    """An event of a type that this reader does not know: kept, skipped by folds, and flagged."""

    type_name: ClassVar[str] = "stoker.unknown.v0"
    writer: ClassVar[str] = "-"
    type: str
    data: dict[str, Any]


class Envelope(Frozen):
    """One CloudEvent as it lies in the log.

    `time` is the producer's clock and is for people; folds use the order of the log and the log's own clock.
    `onbehalfof` and `causationid` carry no underscore because CloudEvents attribute names may not.
    """

    specversion: str = "1.0"
    id: str
    source: str
    type: str
    subject: str
    time: str
    datacontenttype: str = "application/json"
    actor: str
    onbehalfof: str | None = None
    causationid: str | None = None
    traceparent: str | None = None
    # Not validated here, which would copy it: the event made from it checks it.
    data: Annotated[dict[str, Any], SkipValidation] = Field(default_factory=dict)


class Recorded:
    """An event at its place in the log: `seq` orders everything, `at_ms` is the log's own clock, never running back.

    A stored envelope may be given as its bytes, and is then opened when somebody looks into it: folds read millions of
    events and need the event alone. Never changed after it was made, like all values here.
    """

    __slots__ = ("_envelope", "at_ms", "event", "seq")

    def __init__(self, seq: int, at_ms: int, envelope: Envelope | bytes, event: Event) -> None:
        self.seq = seq
        self.at_ms = at_ms
        self.event = event
        self._envelope = envelope

    @property
    def envelope(self) -> Envelope:
        if isinstance(self._envelope, bytes):
            self._envelope = Envelope.model_validate_json(self._envelope)
        return self._envelope

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recorded):
            return NotImplemented
        mine, theirs = (self.seq, self.at_ms, self.event), (other.seq, other.at_ms, other.event)
        return mine == theirs and self.envelope == other.envelope

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Recorded(seq={self.seq}, at_ms={self.at_ms}, envelope={self.envelope!r}, event={self.event!r})"
