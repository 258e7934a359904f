"""A raw spec in, a JobSpec or every mistake in it out: where, what, and what was probably meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from stoker_proto import FieldError, JobSpec, Problem, ProblemError, problem

SCHEMA = JobSpec.model_json_schema()
CODES = {
    "extra_forbidden": "unknown_field",
    "missing": "missing",
    "literal_error": "not_allowed",
    "enum": "not_allowed",
}
Loc = tuple[str | int, ...]


def read_spec(raw: object, text: str | None = None) -> JobSpec:
    """The spec. Raises ProblemError (invalid_spec) with all its mistakes, and their lines when `text` is the source."""
    if not isinstance(raw, Mapping):
        raise ProblemError(problem("invalid_spec", f"A job spec is a mapping of fields, not {_kind(raw)}"))
    errors = [*_cross_checks(raw)]
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        errors += [e for e in map(_field_error, _own(error)) if e is not None]
    if errors or spec is None:
        lines = Lines(text) if text is not None else None
        placed = [e.model_copy(update={"line": lines.of(e.pointer)}) if lines else e for e in errors]
        raise ProblemError(_invalid(sorted(placed, key=lambda e: (e.line or 0, e.pointer))))
    return spec


def read_yaml(text: str) -> JobSpec:
    """The spec of a YAML document. Raises ProblemError (invalid_spec)."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        what = str(getattr(error, "problem", None) or error)
        told = FieldError(pointer="", code="invalid", message=f"not YAML: {what}", line=line)
        raise ProblemError(_invalid([told])) from error
    return read_spec(raw, text)


def _invalid(errors: Sequence[FieldError]) -> Problem:
    count = len(errors)
    detail = f"{count} mistake{'s' if count != 1 else ''}; nothing was created"
    return problem(
        "invalid_spec", detail, errors=tuple(errors), next_actions=("mend the fields named in errors and submit again",)
    )


def _own(error: ValidationError) -> list[Any]:
    """Errors of single fields. What compares fields is checked on the raw spec, so that it shows beside the others."""
    return [
        e
        for e in error.errors(include_url=False)
        if not (e["type"] == "value_error" and e["loc"] in ((), ("compute",)))
    ]


def _field_error(error: Any) -> FieldError | None:
    loc: Loc = tuple(error["loc"])
    # pydantic adds the tried type of a union to the location; a pointer has only the path.
    path = tuple(p for p in loc if not (isinstance(p, str) and p in ("str", "int", "float", "bool", "[key]")))
    pointer = pointer_of(path)
    kind = CODES.get(error["type"], "wrong_type" if error["type"].endswith("_type") else "invalid")
    parent = _schema_at(path[:-1])
    fields = tuple(sorted(parent.get("properties", {})))
    name = str(path[-1]) if path else ""
    if kind == "unknown_field":
        close = _closest(name, fields)
        message = f"there is no field {name!r} here" + (f"; did you mean {close!r}?" if close else "")
        return FieldError(pointer=pointer, code=kind, message=message, suggestion=close, allowed=fields)
    if kind == "missing":
        return FieldError(pointer=pointer, code=kind, message=f"{name!r} is needed")
    if kind == "not_allowed":
        allowed = tuple(map(str, _schema_at(path).get("enum", ())))
        close = _closest(str(error.get("input")), allowed)
        message = f"{error.get('input')!r} is not one of {', '.join(allowed)}"
        return FieldError(pointer=pointer, code=kind, message=message, suggestion=close, allowed=allowed)
    message = str(error["msg"]).removeprefix("Value error, ")
    pattern = _schema_at(path).get("pattern")
    if pattern:
        message = f"{error.get('input')!r} does not match {pattern}"
        if _schema_at(path).get("description"):
            message += f" ({_schema_at(path)['description']})"
    return FieldError(pointer=pointer, code=kind, message=message)


def _closest(name: str, known: Sequence[str]) -> str | None:
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def _cross_checks(raw: Mapping[Any, Any]) -> list[FieldError]:
    """Rules between fields, on whatever of them is there."""
    errors = []
    command, entrypoint = raw.get("command"), raw.get("entrypoint")
    if command is not None and entrypoint is not None:
        told = "command and entrypoint exclude each other; keep one"
        errors.append(FieldError(pointer="/entrypoint", code="invalid", message=told))
    elif command is None and entrypoint is None:
        told = "say what to run: command (a shell command per node) or entrypoint (a Python file)"
        errors.append(FieldError(pointer="/command", code="missing", message=told))
    if command is not None and raw.get("args"):
        errors.append(
            FieldError(pointer="/args", code="invalid", message="args belong to entrypoint; put them into command")
        )
    compute = raw.get("compute")
    if isinstance(compute, Mapping):
        errors += _whole_nodes(compute)
    return errors


def _whole_nodes(compute: Mapping[Any, Any]) -> list[FieldError]:
    kind, total = compute.get("accelerator_type"), compute.get("num_accelerators")
    if not (isinstance(kind, str) and kind.startswith("GPU_") and isinstance(total, int) and "x" in kind):
        return []
    count = kind.removeprefix("GPU_").split("x", 1)[0]
    if not count.isdigit() or int(count) == 0 or total < 1 or total % int(count) == 0:
        return []
    per_node = int(count)
    below, above = total - total % per_node, total - total % per_node + per_node
    choices = tuple(str(n) for n in (below, above) if n > 0)
    told = f"{total} is not a multiple of {per_node}, the GPUs per node in {kind}; use {' or '.join(choices)}"
    pointer = "/compute/num_accelerators"
    return [FieldError(pointer=pointer, code="invalid", message=told, suggestion=choices[0], allowed=choices)]


def pointer_of(path: Sequence[str | int]) -> str:
    """The JSON Pointer (RFC 6901) of a path."""
    return "".join(f"/{str(p).replace('~', '~0').replace('/', '~1')}" for p in path)


def _schema_at(path: Loc) -> dict[str, Any]:
    """The part of the spec's JSON Schema that describes this path; empty when there is none."""
    node: dict[str, Any] = SCHEMA
    for part in path:
        node = _resolved(node)
        if isinstance(part, int):
            node = node.get("items", {})
        elif part in node.get("properties", {}):
            node = node["properties"][part]
        else:
            extra = node.get("additionalProperties")
            node = extra if isinstance(extra, dict) else {}
    return _resolved(node)


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        return {**SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[-1]], **{k: v for k, v in node.items() if k != "$ref"}}
    for choice in node.get("anyOf", ()):
        if choice.get("type") != "null":
            return {**_resolved(choice), **{k: v for k, v in node.items() if k != "anyOf"}}
    return node


def _kind(raw: object) -> str:
    return {type(None): "nothing", list: "a list", str: "a text"}.get(type(raw), type(raw).__name__)


class Lines:
    """Where each field stands in the YAML source."""

    def __init__(self, text: str) -> None:
        self._root = yaml.compose(text, Loader=yaml.SafeLoader)

    def of(self, pointer: str) -> int | None:
        """The line of the field, or of the nearest thing above it."""
        node, line = self._root, 1
        for part in filter(None, pointer.split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, yaml.MappingNode):
                pair = next(((k, v) for k, v in node.value if k.value == name), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line + 1, pair[1]
            elif isinstance(node, yaml.SequenceNode) and name.isdigit() and int(name) < len(node.value):
                node = node.value[int(name)]
                line = node.start_mark.line + 1
            else:
                break
        return line
