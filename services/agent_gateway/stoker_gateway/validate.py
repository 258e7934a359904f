"""A raw job spec in, a JobSpec that the cluster knows or every mistake in it out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stoker_proto import Cluster, FieldError, JobSpec

from .reading import Form, not_allowed
from .yaml_source import YamlSource

SPEC = Form(
    JobSpec,
    noun="job spec",
    code="invalid_spec",
    so="nothing was created",
    action="mend the fields named in errors and submit again",
    checked=("", "/compute"),
)
WHOLE = re.compile(r"GPU_([1-9][0-9]{0,5})x.+")
DEFAULT = Cluster()


def read_spec(
    raw: object, source: YamlSource | None = None, cluster: Cluster = DEFAULT, also: Iterable[FieldError] = ()
) -> JobSpec:
    """The spec, for this cluster. Raises ProblemError (invalid_spec) with all its mistakes, those in `also` among them.

    Mistakes have their lines when the spec has a source.
    """
    raw = SPEC.mapping(raw)
    return SPEC.read(raw, source, [*_between_fields(raw), *_not_here(raw, cluster), *also])


def read_yaml(text: str, cluster: Cluster = DEFAULT) -> JobSpec:
    """The spec of a YAML document. Raises ProblemError (invalid_spec)."""
    source = SPEC.text(text)
    return read_spec(source.value, source, cluster)


def part(raw: object, name: str) -> Mapping[Any, Any]:
    """A mapping inside a mapping; empty when there is none."""
    inner = raw.get(name) if isinstance(raw, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _not_here(raw: Mapping[Any, Any], cluster: Cluster) -> Iterator[FieldError]:
    """Names that the cluster does not have."""
    queues, classes = [q.name for q in cluster.queues], [c.name for c in cluster.classes]
    named: list[tuple[str, object, Sequence[str], str]] = [
        ("/schedule/window", part(raw, "schedule").get("window"), [w.name for w in cluster.windows], "window"),
        ("/compute/within", part(raw, "compute").get("within"), cluster.topology, "topology level"),
    ]
    if isinstance(raw.get("compute"), Mapping):
        compute = raw["compute"]
        named += [
            ("/compute/queue", compute.get("queue", "default"), queues, "queue"),
            ("/compute/priority_class", compute.get("priority_class", "NORMAL"), classes, "priority class"),
        ]
    for pointer, given, known, what in named:
        if isinstance(given, str) and given not in known:
            there = f"{', '.join(known[:20])}{' and more' if len(known) > 20 else ''}" if known else "none"
            yield not_allowed(pointer, given, known, f"there is no {what} {given!r} here; there is {there}")


def _between_fields(raw: Mapping[Any, Any]) -> list[FieldError]:
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
    return errors + _whole_nodes(part(raw, "compute")) + _thousandths(part(raw, "compute"))


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


def _thousandths(compute: Mapping[Any, Any]) -> list[FieldError]:
    share = compute.get("gpu_fraction")
    if not isinstance(share, float) or not 0.001 <= share <= 1 or abs(share * 1000 - round(share * 1000)) <= 1e-6:
        return []
    told, near = f"{share} is finer than a thousandth", f"{round(share, 3):g}"
    return [FieldError(pointer="/compute/gpu_fraction", code="invalid", message=told, suggestion=near)]
