"""A raw cluster configuration in, a Cluster or every mistake in it out; and what differs between two of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from stoker_proto import Cluster, FieldError
from stoker_proto.cluster import mistakes_of

from .reading import Form, not_allowed, pointer_of
from .yaml_source import YamlSource

CLUSTER = Form(
    Cluster,
    noun="cluster configuration",
    code="invalid_cluster",
    so="the configuration in force stays as it is",
    action="mend the fields named in errors and apply again",
    checked=("",),
)
NAMED = ("queues", "classes", "windows")
Path = tuple[str | int, ...]


def read_cluster(raw: object, zones: Collection[str], source: YamlSource | None = None) -> Cluster:
    """The configuration. Raises ProblemError (invalid_cluster) with all its mistakes, and their lines with a source.

    `zones` are the IANA time zones that there are.
    """
    raw = CLUSTER.mapping(raw)
    return CLUSTER.read(raw, source, [*_between_parts(raw), *_unknown_zones(raw, zones)])


def _between_parts(raw: Mapping[Any, Any]) -> Iterator[FieldError]:
    known = _well_typed(raw)
    for path, told in mistakes_of(known):
        pointer = pointer_of(path)
        part = {"parent": "queues", "window": "windows"}.get(str(path[-1]))
        if part is None or not told.startswith("there is no"):
            yield FieldError(pointer=pointer, code="invalid", message=told)
        else:
            names = [entry["name"] for entry in known.get(part, ())]
            yield not_allowed(pointer, known[path[0]][path[1]][path[2]], names, told)


def _well_typed(raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parts whose names are texts, without references to parts that are not: those are told by their types."""
    known: dict[Any, Any] = {part: raw[part] for part in NAMED if _entries_named(raw.get(part))}
    spoilt = "windows" in raw and "windows" not in known
    for part in known:
        dropped = {"parent", "window"} if part == "queues" else set()
        known[part] = [
            {k: v for k, v in e.items() if k not in dropped or (isinstance(v, str) and not (spoilt and k == "window"))}
            for e in known[part]
        ]
    return known


def _entries_named(entries: object) -> bool:
    return isinstance(entries, list | tuple) and all(
        isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in entries
    )


def _unknown_zones(raw: Mapping[Any, Any], zones: Collection[str]) -> Iterator[FieldError]:
    windows = raw.get("windows")
    for at, window in enumerate(windows if isinstance(windows, list | tuple) else ()):
        zone = window.get("zone") if isinstance(window, Mapping) else None
        if isinstance(zone, str) and zone not in zones:
            pointer = pointer_of(("windows", at, "zone"))
            told = f"there is no time zone {zone!r}; the names are those of IANA, such as Europe/Berlin"
            close = not_allowed(pointer, zone, sorted(zones), told)
            yield close.model_copy(update={"allowed": ()})  # six hundred names would hide the mistake


class Change(NamedTuple):
    """One difference. `path` is a JSON Pointer in which entries of lists go by their names."""

    path: str
    kind: Literal["added", "removed", "changed"]
    old: Any = None
    new: Any = None


def diff(old: Cluster, new: Cluster) -> list[Change]:
    """What turns the one into the other, entry by entry and field by field; nothing when they are the same."""
    found: list[Change] = []
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for part in NAMED:
        olds, news = ({e["name"]: e for e in side[part]} for side in (before, after))
        spare = [e.model_dump(mode="json", exclude_defaults=True) for side in (old, new) for e in getattr(side, part)]
        said = {e["name"]: {k: v for k, v in e.items() if k != "name"} for e in spare}  # what is not as it is anyway
        found += [Change(pointer_of((part, n)), "removed", old=said[n]) for n in olds if n not in news]
        found += [Change(pointer_of((part, n)), "added", new=said[n]) for n in news if n not in olds]
        both = [n for n in olds if n in news]
        for name in both:
            found += _fields((part, name), olds[name], news[name])
        if both != [n for n in news if n in olds]:
            found.append(Change(pointer_of((part,)), "changed", list(olds), list(news)))
    for part in ("topology", "labels", "scheduling"):
        found += _fields((part,), before[part], after[part])
    return found


def _fields(path: Path, old: Any, new: Any) -> Iterator[Change]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield Change(pointer_of(path), "changed", old, new)
        return
    for key in [*old, *(k for k in new if k not in old)]:
        if key not in new:
            yield Change(pointer_of((*path, key)), "removed", old=old[key])
        elif key not in old:
            yield Change(pointer_of((*path, key)), "added", new=new[key])
        else:
            yield from _fields((*path, key), old[key], new[key])


class Names(NamedTuple):
    """What unfinished jobs go by, each name with one of the jobs that does and how many do."""

    queues: Mapping[str, tuple[str, int]]
    classes: Mapping[str, tuple[str, int]]
    windows: Mapping[str, tuple[str, int]]


def still_needed(old: Cluster, new: Cluster, used: Names) -> list[FieldError]:
    """A mistake for each queue, class and window that would go though unfinished jobs name it."""
    words: Sequence[tuple[str, str, Mapping[str, tuple[str, int]]]] = (
        ("queues", "queue", used.queues), ("classes", "class", used.classes), ("windows", "window", used.windows),
    )  # fmt: skip
    found = []
    for part, word, jobs in words:
        kept = {entry.name for entry in getattr(new, part)}
        for name in (entry.name for entry in getattr(old, part)):
            if name in jobs and name not in kept:
                first, count = jobs[name]
                others = f" and {count - 1} more" if count > 1 else ""
                told = f"{word} {name!r} cannot go: {first}{others} would be without it; cancel or finish them first"
                found.append(FieldError(pointer=f"/{part}", code="in_use", message=told))
    return found
