"""Events to and from bytes. Upcasters for old versions live here, in the reader, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def decoder(wants: frozenset[str] | None = None) -> Callable[[bytes, int, int], Recorded | None]:
    """A function of payload, sequence and time that reads stored events for folds: those whose type is in `wants`.

    It answers None for an event of another type, which is not opened. One of a wanted type is made straight from the
    bytes of its data, and its envelope is opened when somebody looks into it. It is found by how `encode` writes:
    `data` last, and quotes inside of strings escaped, so that no value looks like a key. An envelope that somebody
    else wrote in another order, or with spaces, is read the slow way. Raises ValueError like `decode`.
    """
    names = None if wants is None else {name.encode() for name in wants}
    makers = {
        name.encode(): cls.__pydantic_validator__.validate_json
        for name, cls in REGISTRY.items()
        if wants is None or name in wants
    }

    def read(payload: bytes, seq: int, at_ms: int) -> Recorded | None:
        data = payload.find(b'"data":')
        start = payload.find(b'"type":"', 0, data) + 8 if data > 0 else 0
        if start > 8:
            type_ = payload[start : payload.find(b'"', start)]
            make = makers.get(type_)
            if make is not None:
                try:
                    return Recorded(seq, at_ms, payload, make(payload[data + 7 : -1]))
                except ValueError:
                    return decode(payload, seq=seq, at_ms=at_ms)  # reads it, or says better what is wrong
            if names is not None and type_ not in names:
                return None
        recorded = decode(payload, seq=seq, at_ms=at_ms)
        return recorded if wants is None or recorded.envelope.type in wants else None

    return read


def event_id(payload: bytes) -> str:
    """The id of a stored event."""
    found: str = from_json(payload)["id"]
    return found


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
