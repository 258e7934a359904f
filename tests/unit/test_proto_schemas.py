"""The committed schemas are current, and words that logs already hold are never taken back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from stoker_chassis import asyncapi
from stoker_proto import REGISTRY, generate

COMMITTED = generate.committed()


def test_the_committed_schemas_are_what_the_models_say() -> None:
    told = {name: generate.text(schema) for name, schema in generate.schemas().items()}
    there = {file.name.removesuffix(".json"): file.read_text() for file in generate.FOLDER.iterdir()}
    assert there == told, "run: python -m stoker_proto.generate"


def test_every_event_type_has_a_committed_schema() -> None:
    assert REGISTRY.keys() <= COMMITTED.keys()


def test_the_models_read_what_the_committed_schemas_allow() -> None:
    assert generate.broken(COMMITTED, generate.schemas()) == []


def test_the_committed_asyncapi_document_is_current() -> None:
    assert asyncapi.FILE.read_text() == asyncapi.document(), "run: python -m stoker_chassis.asyncapi"


def test_the_asyncapi_document_tells_every_event_with_its_subject_as_a_template() -> None:
    document = json.loads(asyncapi.FILE.read_text())
    assert document["asyncapi"].startswith("3.")
    channels = document["channels"]
    assert REGISTRY.keys() <= channels.keys()
    submitted = channels["stoker.job.submitted.v1"]
    assert submitted["address"] == "stoker.event.job.{job_id}.submitted"
    assert submitted["parameters"].keys() == {"job_id"}


def changed(name: str, change: Any) -> list[str]:
    """What is broken when one committed schema had been like this."""
    new = copy.deepcopy(COMMITTED)
    change(new[name])
    return generate.broken(COMMITTED, new)


def drop(*path: str) -> Any:
    def change(schema: dict[str, Any]) -> None:
        for step in path[:-1]:
            schema = schema[step]
        del schema[path[-1]]

    return change


def put(value: Any, *path: str) -> Any:
    def change(schema: dict[str, Any]) -> None:
        for step in path[:-1]:
            schema = schema.setdefault(step, {})
        schema[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("stoker.job.submitted.v1", drop("properties", "code"), "stoker.job.submitted.v1/code: the field is gone"),
        (
            "stoker.job.submitted.v1",
            drop("$defs", "Compute", "properties", "priority_class"),
            "stoker.job.submitted.v1/spec/compute/priority_class: the field is gone",
        ),
        (
            "stoker.job.finished.v1",
            put(["succeeded", "failed", "cancelled"], "properties", "state", "enum"),
            'stoker.job.finished.v1/state: lost "expired"',
        ),
        (
            "stoker.job.requeued.v1",
            put(["job_id", "attempt", "outcome", "cause", "not_before_ms"], "required"),
            "stoker.job.requeued.v1/not_before_ms: is newly required",
        ),
        (
            "stoker.attempt.progressed.v1",
            put("string", "properties", "step", "type"),
            "stoker.attempt.progressed.v1/step: takes string, no longer integer",
        ),
        (
            "stoker.attempt.started.v1",
            put({"type": "integer"}, "properties", "resume_step"),
            "stoker.attempt.started.v1/resume_step: no longer takes null",
        ),
        (
            "stoker.scheduler.decisions.v1",
            drop("$defs", "Fence", "properties", "node"),
            "stoker.scheduler.decisions.v1/actions/*/node: the field is gone",
        ),
        (
            "stoker.attempt.released.v1",
            put(["process group gone"], "properties", "proof", "enum"),
            "stoker.attempt.released.v1/proof: lost any value outside its enum",
        ),
    ],
)
def test_a_change_that_old_logs_could_not_survive_is_refused(name: str, change: Any, found: str) -> None:
    assert found in changed(name, change)


def test_a_type_that_is_gone_is_refused() -> None:
    new = {name: schema for name, schema in COMMITTED.items() if name != "stoker.node.scanned.v1"}
    assert generate.broken(COMMITTED, new) == ["stoker.node.scanned.v1: the type is gone"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("stoker.job.submitted.v1", put({"type": "string", "default": ""}, "properties", "team")),
        (
            "stoker.job.finished.v1",
            put(["succeeded", "failed", "cancelled", "expired", "x"], "properties", "state", "enum"),
        ),
        ("stoker.attempt.progressed.v1", put("number", "properties", "step", "type")),
        ("stoker.job.requeued.v1", put(["job_id", "attempt", "outcome"], "required")),
        ("stoker.attempt.started.v1", put({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "properties", "fence")),
    ],
)
def test_a_change_that_only_adds_is_taken(name: str, change: Any) -> None:
    assert changed(name, change) == []


def test_the_generator_does_not_write_over_what_it_would_break(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(tmp_path)
    file = tmp_path / "stoker.attempt.progressed.v1.json"
    wider = json.loads(file.read_text())
    wider["properties"]["epoch"] = {"type": "integer"}
    file.write_text(generate.text(wider))
    with pytest.raises(SystemExit) as stopped:
        generate.main(tmp_path)
    assert stopped.value.code == 1
    assert "stoker.attempt.progressed.v1/epoch: the field is gone" in capsys.readouterr().out
    assert json.loads(file.read_text()) == wider
