"""Events to and from bytes. Upcasters for old versions live here, in the reader, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json

from . import cluster, jobs, nodes
from .envelope import Envelope, Event, Recorded, Unknown


def _leaves(cls: type[Event]) -> list[type[Event]]:
    found = [cls] if "type_name" in cls.__dict__ else []
    for sub in cls.__subclasses__():
        found += _leaves(sub)
    return found


REGISTRY: dict[str, type[Event]] = {
    cls.type_name: cls
    for cls in sorted(_leaves(Event), key=lambda c: c.type_name)
    if cls.__module__ in (jobs.__name__, nodes.__name__, cluster.__name__)
}
# Bound once: a reader that rebuilds calls these half a million times.
_VALIDATE = {type_: cls.__pydantic_validator__.validate_python for type_, cls in REGISTRY.items()}
_ENVELOPE = Envelope.__pydantic_validator__.validate_python


def decode_event(type_: str, data: dict[str, Any]) -> Event:
    """The event of this type; `Unknown` when the type is new to this reader."""
    validate = _VALIDATE.get(type_)
    event: Event = validate(data) if validate else Unknown(type=type_, data=data)
    return event


def seal(
    event: Event, *, id: str, source: str, time: str, actor: str, onbehalfof: str | None = None,
    causationid: str | None = None, traceparent: str | None = None,
) -> Envelope:  # fmt: skip
    """Put an event into its envelope."""
    return Envelope(
        id=id, source=source, type=event.type_name, subject=event.subject(), time=time, actor=actor,
        onbehalfof=onbehalfof, causationid=causationid, traceparent=traceparent,
        data=event.model_dump(mode="json"),
    )  # fmt: skip


def _body(envelope: Envelope) -> dict[str, Any]:
    """Attributes that are set. A null inside `data` is the job's own and stays."""
    return {name: value for name, value in envelope if value is not None}


def encode(envelope: Envelope) -> bytes:
    return to_json(_body(envelope))


def decode(payload: bytes, *, seq: int, at_ms: int) -> Recorded:
    """Read one stored event; raises ValueError when the bytes are not an envelope or its data does not fit its type."""
    raw = from_json(payload)
    envelope: Envelope = _ENVELOPE(raw)
    return Recorded(seq, at_ms, envelope, decode_event(envelope.type, envelope.data))


def to_line(recorded: Recorded) -> str:
    """One line of an exported log: the CloudEvent with its place in the log as extension attributes."""
    body = _body(recorded.envelope)
    return json.dumps(
        body | {"logseq": recorded.seq, "logtimems": recorded.at_ms}, separators=(",", ":"), sort_keys=True
    )


def from_line(line: str) -> Recorded:
    """Read a line written by `to_line`."""
    body = json.loads(line)
    seq, at_ms = body.pop("logseq"), body.pop("logtimems")
    envelope = Envelope.model_validate(body)
    return Recorded(seq=seq, at_ms=at_ms, envelope=envelope, event=decode_event(envelope.type, envelope.data))
