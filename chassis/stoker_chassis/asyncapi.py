"""What travels on NATS as AsyncAPI 3: `python -m stoker_chassis.asyncapi` writes `proto/asyncapi.json`.

FastStream exports it from a broker with one publisher for each event type and each kind of telemetry.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, cast

from faststream.nats import NatsBroker
from faststream.specification import AsyncAPI
from pydantic import BaseModel, create_model

from stoker_proto import REGISTRY, DeviceSample, Envelope, Event, LogBatch, MetricBatch, subjects

FILE = Path(__file__).resolve().parents[2] / "proto" / "asyncapi.json"
PARAMETERS = {
    "job_id": "the job",
    "attempt": "the attempt's number, from 1",
    "node": "the node's name",
    "rank": "the rank",
    "service": "the service's name",
    "window": "the window's name",
}
ATTEMPT, RANK = cast(int, "{attempt}"), cast(int, "{rank}")
TELEMETRY: dict[str, type[BaseModel]] = {
    subjects.log("{job_id}", ATTEMPT, "{node}", RANK): LogBatch,
    subjects.metric("{job_id}", ATTEMPT): MetricBatch,
    subjects.device("{node}"): DeviceSample,
}


def address(event: type[Event]) -> str:
    """The subject of an event type, with its varying tokens in braces."""
    blank: dict[str, Any] = {name: f"{{{name}}}" for name in PARAMETERS}
    return event.model_construct(**blank).subject()


def message(event: type[Event]) -> type[BaseModel]:
    """The CloudEvent that carries this event."""
    type_: Any = Literal[event.type_name]
    return create_model(f"{event.__name__}Message", __base__=Envelope, type=(type_, ...), data=(event, ...))


def document() -> str:
    """The AsyncAPI document, with the parameters of its addresses, which FastStream leaves out."""
    broker = NatsBroker()
    for name, event in REGISTRY.items():
        told = f"{event.__doc__} Written by: {event.writer}."
        broker.publisher(address(event), schema=message(event), title=name, description=told)
    for subject, model in TELEMETRY.items():
        broker.publisher(subject, schema=model, title=model.__name__, description=model.__doc__)
    exported = AsyncAPI(broker, title="Stoker", version="v1", schema_version="3.0.0").to_specification()
    document: dict[str, Any] = json.loads(exported.to_json())
    for channel in document["channels"].values():
        names = re.findall(r"{(\w+)}", channel["address"])
        if names:
            channel["parameters"] = {name: {"description": PARAMETERS[name]} for name in names}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def main() -> None:
    FILE.write_text(document())


if __name__ == "__main__":
    main()
