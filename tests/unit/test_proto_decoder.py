"""Decoding for folds tells the same as decoding in full, however an event was written, and opens what is wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker_proto import Envelope, NodeJoined, NodeReady, Unknown, decode, decoder, encode, from_line, seal
from tests.builders import joined, ready

CORPUS = sorted((Path(__file__).parents[1] / "replay" / "corpus").glob("*.json"))


def envelope(node: str = "n1", **attributes: str) -> Envelope:
    fields = {"id": "e1", "source": "test", "time": "2026-01-01T00:00:00Z", "actor": "test"} | attributes
    return seal(ready(node), **fields)


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_an_event_of_every_type_is_read_the_same_both_ways(file: Path) -> None:
    stored = from_line(file.read_text())
    payload = encode(stored.envelope)
    assert decoder()(payload, 7, 8) == decode(payload, seq=7, at_ms=8)
    assert decoder(frozenset({stored.envelope.type}))(payload, 7, 8) == decode(payload, seq=7, at_ms=8)
    assert decoder(frozenset({"stoker.other.v1"}))(payload, 7, 8) is None


TRAP = '"type":"stoker.node.joined.v1","data":{"a":1}'


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(json.dumps(json.loads(encode(envelope()))).encode(), id="with spaces"),
        pytest.param(json.dumps(dict(reversed(json.loads(encode(envelope())).items()))).encode(), id="data first"),
        pytest.param(
            json.dumps(
                {"data": ready("n1").model_dump() | {"type": "stoker.node.joined.v1"}}
                | {k: v for k, v in json.loads(encode(envelope())).items() if k != "data"},
                separators=(",", ":"),
            ).encode(),
            id="data first, with another type inside",
        ),
        pytest.param(encode(envelope(source=TRAP)), id="an attribute that looks like a type and data"),
        pytest.param(encode(envelope(node=TRAP)), id="data that looks like a type and data"),
        pytest.param(encode(envelope())[:-1] + b',"later":{"a":1}}', id="an attribute after data"),
    ],
)
def test_how_an_envelope_was_written_does_not_matter(payload: bytes) -> None:
    expected = decode(payload, seq=1, at_ms=2)
    assert isinstance(expected.event, NodeReady)
    assert decoder()(payload, 1, 2) == expected
    assert decoder(frozenset({NodeReady.type_name}))(payload, 1, 2) == expected
    assert decoder(frozenset({NodeJoined.type_name}))(payload, 1, 2) is None


def test_the_envelope_is_there_for_who_looks() -> None:
    sent = seal(joined("n1"), id="e1", source="s", time="2026-01-01T00:00:00Z", actor="a", traceparent="00-1-1-01")
    recorded = decoder()(encode(sent), 1, 2)
    assert recorded is not None
    assert recorded.envelope == sent
    assert recorded.event == joined("n1")


def test_an_unknown_type_is_kept() -> None:
    later = envelope().model_copy(update={"type": "stoker.later.v9", "data": {"a": None}})
    recorded = decoder()(encode(later), 1, 2)
    assert recorded is not None
    assert recorded.event == Unknown(type="stoker.later.v9", data={"a": None})


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"type":"stoker.node.ready.v1","data":{}}', b"\xff"])
def test_what_is_no_event_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        decoder()(payload, 1, 2)


def test_data_that_does_not_fit_its_type_is_refused() -> None:
    broken = envelope().model_copy(update={"data": {"node": 1}})
    with pytest.raises(ValueError, match="boot_epoch"):
        decoder()(encode(broken), 1, 2)
