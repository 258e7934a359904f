"""The envelope around every event: a CloudEvents 1.0 message in structured JSON, and its place in the log."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

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


class Recorded(NamedTuple):
    """An event at its place in the log: `seq` orders everything, `at_ms` is the log's own clock, never running back.

    A named tuple, because readers make millions of them and its fields are checked already.
    """

    seq: int
    at_ms: int
    envelope: Envelope
    event: Event
