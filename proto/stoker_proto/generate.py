"""The words as JSON Schemas in `proto/schemas`: `python -m stoker_proto.generate` writes them, unless that would break
a log that was already written. What it refuses: a type or field gone, an enum member lost, a field newly required, a
value no longer taken."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .codec import REGISTRY
from .desired import NodeAssignments
from .envelope import Envelope
from .problems import Problem
from .spec import JobSpec
from .telemetry import DeviceSample, LogBatch, MetricBatch

FOLDER = Path(__file__).resolve().parents[1] / "schemas"
Schema = dict[str, Any]
OTHERS: dict[str, type[BaseModel]] = {
    "envelope": Envelope,
    "job_spec": JobSpec,
    "problem": Problem,
    "node_assignments": NodeAssignments,
    "log_batch": LogBatch,
    "metric_batch": MetricBatch,
    "device_sample": DeviceSample,
}


def schemas() -> dict[str, Schema]:
    """Every schema by name: the data of each event by its type, and what travels beside events."""
    models: dict[str, type[BaseModel]] = {**REGISTRY, **OTHERS}
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:stoker:schema:{name}"}
        | model.model_json_schema()
        for name, model in sorted(models.items())
    }


def text(schema: Schema) -> str:
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def committed(folder: Path = FOLDER) -> dict[str, Schema]:
    """The schemas in the folder: what is out there, in logs and in other programs."""
    return {file.name.removesuffix(".json"): json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def broken(old: dict[str, Schema], new: dict[str, Schema]) -> list[str]:
    """What a reader with the new schemas could no longer read of what was written under the old ones."""
    found = [f"{name}: the type is gone" for name in old if name not in new]
    for name in old.keys() & new.keys():
        found += [f"{name}{at}: {what}" for at, what in _breaks(old[name], new[name], old[name], new[name])]
    return sorted(found)


def _target(schema: Schema, root: Schema) -> Schema:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def _variants(schema: Schema, root: Schema) -> list[Schema]:
    """The alternatives of a schema, each resolved; one that is no union is its own only alternative."""
    schema = _target(schema, root)
    union = schema.get("anyOf") or schema.get("oneOf")
    return [inner for part in union for inner in _variants(part, root)] if union else [schema]


def _members(schema: Schema) -> set[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if values is None else {json.dumps(value) for value in values}


def _takes(old: Schema, new: Schema) -> bool:
    """Is `new` what `old` became? By type; objects by their names too, so that members of a union are told apart."""
    types = (old.get("type"), new.get("type"))
    if types[1] is None or types == ("integer", "number"):
        return True
    return types[0] == types[1] and (types[0] != "object" or old.get("title") == new.get("title"))


def _breaks(old: Schema, new: Schema, old_root: Schema, new_root: Schema, at: str = "") -> Iterator[tuple[str, str]]:
    olds, news = _variants(old, old_root), _variants(new, new_root)
    if len(olds) == len(news) == 1:
        pairs = [(olds[0], news)] if olds[0].get("type") == news[0].get("type") or _takes(olds[0], news[0]) else []
        if not pairs:
            yield at, f"takes {news[0].get('type')}, no longer {olds[0].get('type')}"
    else:
        pairs = [(each, [n for n in news if _takes(each, n)]) for each in olds]
    for each, candidates in pairs:
        if not candidates:
            yield at, f"no longer takes {each.get('title') or each.get('type')}"
            continue
        yield from _breaks_of_one(each, candidates[0], old_root, new_root, at)


def _breaks_of_one(old: Schema, new: Schema, old_root: Schema, new_root: Schema, at: str) -> Iterator[tuple[str, str]]:
    was, now = _members(old), _members(new)
    if now is not None:
        lost = sorted(was - now) if was is not None else ["any value outside its enum"]
        if lost:
            yield at, f"lost {', '.join(lost)}"
    had, has = old.get("properties", {}), new.get("properties", {})
    for name in had.keys() - has.keys():
        yield f"{at}/{name}", "the field is gone"
    for name in sorted(set(new.get("required", [])) - set(old.get("required", []))):
        yield f"{at}/{name}", "is newly required"
    for name in sorted(had.keys() & has.keys()):
        yield from _breaks(had[name], has[name], old_root, new_root, f"{at}/{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(old.get(part), dict) and isinstance(new.get(part), dict):
            yield from _breaks(old[part], new[part], old_root, new_root, f"{at}/*")


def main(folder: Path = FOLDER) -> None:
    """Write the schemas; exit 1 and write nothing when that would break readers of what is already written."""
    new = schemas()
    refused = broken(committed(folder), new)
    if refused:
        print("Not written, since logs of the past would not be read any more. Add a new version of the type instead:")
        print("\n".join(f"  {line}" for line in refused))
        sys.exit(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in new.items():
        (folder / f"{name}.json").write_text(text(schema))


if __name__ == "__main__":
    main()
