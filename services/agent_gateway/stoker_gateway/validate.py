"""A raw spec in, a JobSpec or every mistake in it out: where, what, and what was probably meant. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from stoker_proto import FieldError, JobSpec, Problem, ProblemError, problem

from .yaml_source import NotYaml, YamlSource

SCHEMA = JobSpec.model_json_schema()
CODES = {
    "extra_forbidden": "unknown_field",
    "missing": "missing",
    "literal_error": "not_allowed",
    "enum": "not_allowed",
    "int_from_float": "wrong_type",
}
WHOLE = re.compile(r"GPU_([1-9][0-9]{0,5})x.+")
MAX_VALUES = 100_000
MAX_DEPTH = 64
Loc = tuple[str | int, ...]


def read_spec(raw: object, source: YamlSource | None = None) -> JobSpec:
    """The spec. Raises ProblemError (invalid_spec) with all its mistakes, and their lines when they have a source."""
    if not isinstance(raw, Mapping):
        raise ProblemError(problem("invalid_spec", f"A job spec is a mapping of fields, not {_kind(raw)}"))
    errors = [*_not_json(raw), *_cross_checks(raw), *(source.written_twice() if source else ())]
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        told = {e.pointer for e in errors}
        found = [_field_error(e) for e in error.errors(include_url=False) if not _odd_name(e)]
        # A rule between fields shows in the cross checks, beside other mistakes; this one is for what they do not know.
        single = [e for e in found if e.pointer not in ("", "/compute") or e.code != "invalid"]
        errors += [e for e in single if e.pointer not in told] or ([] if errors else found)
    if errors:
        placed = [e.model_copy(update={"line": e.line or source.line(e.pointer)}) if source else e for e in errors]
        raise ProblemError(_invalid(sorted(placed, key=lambda e: (e.line or 0, e.pointer))))
    return spec


def read_yaml(text: str) -> JobSpec:
    """The spec of a YAML document. Raises ProblemError (invalid_spec)."""
    try:
        source = YamlSource(text)
    except NotYaml as error:
        told = FieldError(pointer="", code="invalid", message=f"not YAML: {error}", line=error.line)
        raise ProblemError(_invalid([told])) from error
    return read_spec(source.value, source)


def _invalid(errors: Sequence[FieldError]) -> Problem:
    count = len(errors)
    detail = f"{count} mistake{'s' if count != 1 else ''}; nothing was created"
    return problem(
        "invalid_spec", detail, errors=tuple(errors), next_actions=("mend the fields named in errors and submit again",)
    )


def code_of(kind: str) -> str:
    """What pydantic calls a mistake, in the API's words."""
    return CODES.get(kind, "wrong_type" if kind.endswith(("_type", "_parsing")) else "invalid")


def _odd_name(error: Any) -> bool:
    """A name that is no text: told once, as what no JSON can say."""
    loc = error["loc"]
    return error["type"] == "invalid_key" or (loc[-1:] == ("[key]",) and not isinstance(loc[-2], str))


def _field_error(error: Any) -> FieldError:
    path: Loc = tuple(error["loc"])
    if path and path[-1] == "[key]":  # the name itself is wrong, not its value
        path = path[:-1]
    pointer, code, given = pointer_of(path), code_of(error["type"]), error.get("input")
    name = str(path[-1]) if path else ""
    schema = _schema_at(path)
    if code == "unknown_field":
        return _unknown(pointer, name, tuple(sorted(_schema_at(path[:-1]).get("properties", {}))))
    if code == "missing":
        return FieldError(pointer=pointer, code=code, message=f"{name!r} is needed")
    if code == "not_allowed":
        allowed = tuple(map(str, schema.get("enum") or (schema["const"],)))
        message = f"{given!r} is not one of {', '.join(allowed)}"
        close = _closest(str(given), allowed)
        return FieldError(pointer=pointer, code=code, message=message, suggestion=close, allowed=allowed)
    message = str(error["msg"]).removeprefix("Value error, ")
    if code == "wrong_type":
        message += f"; this is {_kind(given)}"
    elif error["type"] == "string_pattern_mismatch":
        told = schema.get("description")
        message = f"{given!r} does not match {error['ctx']['pattern']}" + (f" ({told})" if told else "")
    return FieldError(pointer=pointer, code=code, message=message)


def _unknown(pointer: str, name: str, fields: Sequence[str]) -> FieldError:
    close = _closest(name, fields) or ELSEWHERE.get(name)
    message = f"there is no field {name!r} here" + (f"; did you mean {close!r}?" if close else "")
    return FieldError(pointer=pointer, code="unknown_field", message=message, suggestion=close, allowed=tuple(fields))


def _closest(name: str, known: Sequence[str]) -> str | None:
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def _not_json(raw: Mapping[Any, Any]) -> Iterator[FieldError]:
    """What no JSON can say: YAML knows dates, bytes, sets, other keys than texts, and values inside themselves."""
    waiting: list[tuple[Loc, Any]] = [((), raw)]
    count = 0
    while waiting:
        path, value = waiting.pop()
        count += 1
        if count > MAX_VALUES or len(path) > MAX_DEPTH:
            what = f"a spec holds {MAX_VALUES} values at most, {MAX_DEPTH} levels deep; send data as files of the code"
            yield FieldError(pointer="", code="invalid", message=what)
            return
        told = None
        if isinstance(value, Mapping):
            odd = [key for key in value if not isinstance(key, str)]
            told = f"names are texts; put {', '.join(map(str, odd))} in quotes" if odd else None
            waiting += [((*path, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*path, at), inner) for at, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            told = f"JSON has no {value}; put it in quotes"
        elif isinstance(value, str) and not _sound(value):
            told = "this text holds half a character (a lone surrogate)"
        elif not isinstance(value, str | int | float | None):
            told = f"{value} was read as {_kind(value)}; put it in quotes"
        if told:
            yield FieldError(pointer=pointer_of(path), code="wrong_type", message=told)


def _sound(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


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
    match = WHOLE.fullmatch(kind) if isinstance(kind, str) else None
    if match is None or not isinstance(total, int) or isinstance(total, bool) or total < 1:
        return []
    per_node = int(match[1])
    over = total % per_node
    if not over:
        return []
    choices = tuple(str(n) for n in (total - over, total - over + per_node) if n > 0)
    told = f"{total} is not a multiple of {per_node}, the GPUs per node in {kind}; use {' or '.join(choices)}"
    pointer = "/compute/num_accelerators"
    return [FieldError(pointer=pointer, code="invalid", message=told, suggestion=choices[0], allowed=choices)]


def pointer_of(path: Sequence[str | int]) -> str:
    """The JSON Pointer (RFC 6901) of a path."""
    text = "".join(f"/{str(p).replace('~', '~0').replace('/', '~1')}" for p in path)
    return text if _sound(text) else text.encode(errors="replace").decode()


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


def _places(path: Loc = ()) -> Iterator[tuple[str, str]]:
    """Every field of the spec and its pointer, the deeper ones first."""
    for name in _schema_at(path).get("properties", {}):
        yield from _places((*path, name))
        yield name, pointer_of((*path, name))


ELSEWHERE = dict(_places())


def _kind(value: object) -> str:
    names = {
        type(None): "nothing", list: "a list", str: "a text", bool: "true or false", int: "a number",
        float: "a number", dict: "a mapping", bytes: "bytes",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")
