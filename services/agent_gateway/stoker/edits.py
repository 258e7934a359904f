"""Single entries of a cluster configuration changed by what flags say: only what is named changes, `none` clears."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from stoker_proto import Problem, ProblemError, problem

NONE = "none"
Entry = dict[str, Any]
Edit = Callable[[Entry], None]


def number(flag: str, text: str) -> float | None:
    """A number, or none. Raises ProblemError."""
    if text.lower() == NONE:
        return None
    try:
        return float(text)
    except ValueError:
        raise ProblemError(_usage(f"{flag} takes a number or {NONE}, not {text!r}")) from None


def name(text: str) -> str | None:
    return None if text.lower() == NONE else text


def put(part: str, entry_name: str, edits: Sequence[Edit]) -> Edit:
    """Change the entry of this name, or add it."""

    def change(cluster: Entry) -> None:
        entry = next((e for e in cluster[part] if e["name"] == entry_name), None)
        if entry is None:
            entry = {"name": entry_name}
            cluster[part].append(entry)
        for edit in edits:
            edit(entry)

    return change


def remove(part: str, word: str, entry_name: str) -> Edit:
    """Take the entry of this name out."""

    def change(cluster: Entry) -> None:
        found(cluster[part], word, entry_name)
        cluster[part] = [e for e in cluster[part] if e["name"] != entry_name]

    return change


def found(entries: Sequence[Entry], word: str, entry_name: str) -> Entry:
    """The entry of this name. Raises ProblemError with the one that was probably meant."""
    names = [e["name"] for e in entries]
    if entry_name not in names:
        close = difflib.get_close_matches(entry_name, names, n=1)
        told = f"There is no {word} {entry_name!r}; there is {', '.join(names) or 'none'}"
        actions = (f"did you mean {close[0]!r}?",) if close else ()
        raise ProblemError(problem("not_found", told, next_actions=actions))
    return entries[names.index(entry_name)]


def field(key: str, value: Any) -> Edit:
    """Set a field of the entry; without a value it is as it was built in."""

    def edit(entry: Entry) -> None:
        if value is None:
            entry.pop(key, None)
        else:
            entry[key] = value

    return edit


def quota(key: str, value: float | None) -> Edit:
    """Set one number of a queue's quota over all models."""
    return lambda entry: field(key, value)(entry.setdefault("gpus", {}))


def model_quota(text: str) -> Edit:
    """`H100=nominal:8,limit:8` sets numbers of one model's quota, `H100=none` takes it away. Raises ProblemError."""
    model, separator, told = text.partition("=")
    usage = _usage(f"--model takes MODEL=nominal:N,limit:N,lend:N or MODEL={NONE}, not {text!r}")
    if not separator or not model or not told:
        raise ProblemError(usage)
    if told.lower() == NONE:
        return lambda entry: entry.setdefault("models", {}).pop(model, None)
    given = {}
    for part in told.split(","):
        key, separator, value = part.partition(":")
        if key not in ("nominal", "limit", "lend") or not separator:
            raise ProblemError(usage)
        given[key] = number(f"--model {model} {key}", value)

    def edit(entry: Entry) -> None:
        quota = entry.setdefault("models", {}).setdefault(model, {})
        for key, value in given.items():
            field(key, value)(quota)

    return edit


def _usage(told: str) -> Problem:
    return problem("invalid_request", told)
