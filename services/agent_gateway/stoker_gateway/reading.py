"""A raw document in, a strict model or every mistake in it out: where, what, and what was probably meant. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from stoker_proto import FieldError, ProblemError, problem

from .yaml_source import NotYaml, YamlSource

CODES = {
    "extra_forbidden": "unknown_field",
    "missing": "missing",
    "literal_error": "not_allowed",
    "enum": "not_allowed",
    "int_from_float": "wrong_type",
}
MAX_VALUES = 100_000
MAX_DEPTH = 64
Loc = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


class Form(Generic[M]):
    """How one kind of document is read.

    `noun` is what people call it, `code` the Problem that names its mistakes, `so` what follows from them, and `action`
    what to do about them. Rules between fields at the pointers `checked` are told by the caller's own checks.
    """

    def __init__(self, model: type[M], noun: str, code: str, so: str, action: str, checked: Sequence[str]) -> None:
        self._model, self._noun, self._code, self._so, self._action = model, noun, code, so, action
        self._checked = checked
        self._schema = model.model_json_schema()
        self._elsewhere = dict(self._places())

    def text(self, text: str) -> YamlSource:
        """The YAML document of a text. Raises ProblemError."""
        try:
            return YamlSource(text)
        except NotYaml as error:
            told = FieldError(pointer="", code="invalid", message=f"not YAML: {error}", line=error.line)
            raise self.refusal([told]) from error

    def mapping(self, raw: object) -> Mapping[Any, Any]:
        """The document, when it is a mapping at all. Raises ProblemError."""
        if not isinstance(raw, Mapping):
            raise ProblemError(problem(self._code, f"A {self._noun} is a mapping of fields, not {kind_of(raw)}"))
        return raw

    def read(self, raw: object, source: YamlSource | None, checks: Iterable[FieldError]) -> M:
        """The document. Raises ProblemError with all its mistakes, and their lines when they have a source."""
        raw = self.mapping(raw)
        errors = list(_not_json(raw, self._noun))
        if any(not e.pointer for e in errors):  # too much to look at any closer
            raise self.refusal(errors, source)
        errors += [*checks, *(source.written_twice() if source else ())]
        try:
            document = self._model.model_validate(raw)
        except ValidationError as error:
            told = {e.pointer for e in errors}
            found = [self._field_error(e) for e in error.errors(include_url=False) if not _odd_name(e)]
            # A rule between fields shows in the checks, beside other mistakes; this one is for what they do not know.
            single = [e for e in found if e.pointer not in self._checked or e.code != "invalid"]
            errors += [e for e in single if e.pointer not in told] or ([] if errors else found)
        if errors:
            raise self.refusal(errors, source)
        return document

    def refusal(self, errors: Iterable[FieldError], source: YamlSource | None = None) -> ProblemError:
        """The Problem that names these mistakes, in the order in which they stand in the document."""
        placed = [e.model_copy(update={"line": e.line or source.line(e.pointer)}) if source else e for e in errors]
        placed.sort(key=lambda e: (e.line or 0, e.pointer))
        detail = f"{len(placed)} mistake{'s' if len(placed) != 1 else ''}; {self._so}"
        return ProblemError(problem(self._code, detail, errors=tuple(placed), next_actions=(self._action,)))

    def _field_error(self, error: Any) -> FieldError:
        path: Loc = tuple(error["loc"])
        if path and path[-1] == "[key]":  # the name itself is wrong, not its value
            path = path[:-1]
        pointer, code, given = pointer_of(path), code_of(error["type"]), error.get("input")
        name = str(path[-1]) if path else ""
        schema = self._schema_at(path)
        if code == "unknown_field":
            return self._unknown(pointer, name, tuple(sorted(self._schema_at(path[:-1]).get("properties", {}))))
        if code == "missing":
            return FieldError(pointer=pointer, code=code, message=f"{name!r} is needed")
        if code == "not_allowed":
            return not_allowed(pointer, given, tuple(map(str, schema.get("enum") or (schema["const"],))))
        message = str(error["msg"]).removeprefix("Value error, ")
        if code == "wrong_type":
            message += f"; this is {kind_of(given)}"
        elif error["type"] == "string_pattern_mismatch":
            told = schema.get("description")
            message = f"{given!r} does not match {error['ctx']['pattern']}" + (f" ({told})" if told else "")
        return FieldError(pointer=pointer, code=code, message=message)

    def _unknown(self, pointer: str, name: str, fields: Sequence[str]) -> FieldError:
        close = closest(name, fields) or self._elsewhere.get(name)
        message = f"there is no field {name!r} here" + (f"; did you mean {close!r}?" if close else "")
        return FieldError(
            pointer=pointer, code="unknown_field", message=message, suggestion=close, allowed=tuple(fields)
        )

    def _schema_at(self, path: Loc) -> dict[str, Any]:
        """The part of the JSON Schema that describes this path; empty when there is none."""
        node: dict[str, Any] = self._schema
        for part in path:
            node = self._resolved(node)
            if isinstance(part, int):
                node = node.get("items", {})
            elif part in node.get("properties", {}):
                node = node["properties"][part]
            else:
                extra = node.get("additionalProperties")
                node = extra if isinstance(extra, dict) else {}
        return self._resolved(node)

    def _resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in node:
            named = self._schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
            return {**named, **{k: v for k, v in node.items() if k != "$ref"}}
        for choice in node.get("anyOf", ()):
            if choice.get("type") != "null":
                return {**self._resolved(choice), **{k: v for k, v in node.items() if k != "anyOf"}}
        return node

    def _places(self, path: Loc = ()) -> Iterator[tuple[str, str]]:
        """Every field outside lists and its pointer, the deeper ones first."""
        for name in self._schema_at(path).get("properties", {}):
            yield from self._places((*path, name))
            yield name, pointer_of((*path, name))


def not_allowed(pointer: str, given: object, allowed: Sequence[str], message: str | None = None) -> FieldError:
    """A value that is none of those there are, and the one that was probably meant."""
    return FieldError(
        pointer=pointer,
        code="not_allowed",
        message=message or f"{given!r} is not one of {', '.join(allowed)}",
        suggestion=closest(str(given), allowed),
        allowed=tuple(allowed),
    )


def closest(name: str, known: Sequence[str]) -> str | None:
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def code_of(kind: str) -> str:
    """What pydantic calls a mistake, in the API's words."""
    return CODES.get(kind, "wrong_type" if kind.endswith(("_type", "_parsing")) else "invalid")


def pointer_of(path: Sequence[str | int]) -> str:
    """The JSON Pointer (RFC 6901) of a path."""
    text = "".join(f"/{str(p).replace('~', '~0').replace('/', '~1')}" for p in path)
    return text if _sound(text) else text.encode(errors="replace").decode()


def kind_of(value: object) -> str:
    names = {
        type(None): "nothing", list: "a list", str: "a text", bool: "true or false", int: "a number",
        float: "a number", dict: "a mapping", bytes: "bytes",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def _odd_name(error: Any) -> bool:
    """A name that is no text: told once, as what no JSON can say."""
    loc = error["loc"]
    return error["type"] == "invalid_key" or (loc[-1:] == ("[key]",) and not isinstance(loc[-2], str))


def _not_json(raw: Mapping[Any, Any], noun: str) -> Iterator[FieldError]:
    """What no JSON can say: YAML knows dates, bytes, sets, other keys than texts, and values inside themselves."""
    waiting: list[tuple[Loc, Any]] = [((), raw)]
    count = 0
    while waiting:
        path, value = waiting.pop()
        count += 1
        if count > MAX_VALUES or len(path) > MAX_DEPTH:
            what = f"a {noun} holds {MAX_VALUES} values at most, {MAX_DEPTH} levels deep"
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
            told = f"{value} was read as {kind_of(value)}; put it in quotes"
        if told:
            yield FieldError(pointer=pointer_of(path), code="wrong_type", message=told)


def _sound(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
