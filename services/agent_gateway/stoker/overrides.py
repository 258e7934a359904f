"""A spec file with single fields changed from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from stoker_proto import FieldError, ProblemError, problem


def read_text(spec: Path) -> str:
    """The text of a spec file. Raises ProblemError when it cannot be read."""
    try:
        return spec.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ProblemError(problem("invalid_request", f"{spec} cannot be read: {why}")) from error


def override(spec: Path, changes: Sequence[str]) -> dict[str, Any]:
    """The spec with `field.path=value` changes applied, values as YAML. Raises ProblemError for what makes no sense."""
    body = _yaml(read_text(spec), str(spec))
    if not isinstance(body, dict):
        raise ProblemError(problem("invalid_spec", f"{spec} is not a mapping of fields"))
    for change in changes:
        path, separator, value = change.partition("=")
        if not separator or not all(path.split(".")):
            raise ProblemError(problem("invalid_request", f"--override {change!r} is not of the form field.path=value"))
        _set(body, path.split("."), _yaml(value, f"--override {change!r}"))
    return body


def _set(body: dict[str, Any], path: Sequence[str], value: Any) -> None:
    target = body
    for at, part in enumerate(path[:-1]):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            told = f"--override {'.'.join(path)}: {'.'.join(path[: at + 1])} is no mapping of fields"
            raise ProblemError(problem("invalid_request", told))
    target[path[-1]] = value


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = str(getattr(error, "problem", None) or error)
        mistake = FieldError(pointer="", code="invalid", message=what, line=mark.line + 1 if mark else None)
        raise ProblemError(problem("invalid_spec", f"{where} is not YAML", errors=(mistake,))) from error
