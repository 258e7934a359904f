"""Whether any set of the nodes that exist could ever hold a job, and if not, which shape could. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stoker_proto import Gpu, JobSpec, Problem, problem
from stoker_proto.spec import Compute

GIB = 2**30


class Machine(NamedTuple):
    """What a node has when nothing runs on it."""

    gpus: tuple[Gpu, ...]
    cpus: int = 0
    memory_bytes: int = 0
    name: str = ""
    labels: Mapping[str, str] = {}


def never_fits(
    spec: JobSpec, machines: Sequence[Machine], labels: Mapping[str, Mapping[str, str]] | None = None
) -> Problem | None:
    """A Problem when even the empty cluster could not hold the job. With no node joined yet nothing can be said.

    `labels` are the cluster's own, by node. A share of a GPU needs one as a whole one does, and each node's part of a
    gang a node of its own.
    """
    if not any(m.gpus for m in machines):
        return None
    compute = spec.compute
    here = sorted({g.model for m in machines for g in m.gpus})
    able = [m for m in machines if _count(m, compute.models) >= compute.per_node]
    roomy = [m for m in able if _beside(m, compute)]
    groups = _groups(roomy, compute.within, labels or {})
    if max(groups, default=0) >= compute.nodes:
        return None
    wanted = " or ".join(compute.models) or "ANY"
    shape: tuple[str, int] | None = None
    if compute.models and not set(compute.models) & set(here):
        detail = f"There is no {wanted} here; the GPUs here are {', '.join(here)}"
    else:
        detail = f"{compute.nodes} node(s) with {compute.per_node} {wanted} GPUs each are needed; "
        detail += f"{len(able)} of {len(machines)} nodes have that many"
    if len(able) >= compute.nodes > len(roomy):
        detail += f", but only {len(roomy)} of them have {compute.cpus_per_node:g} CPUs and "
        detail += f"{compute.memory_gib_per_node:g} GiB of memory beside them"
        most = f"{max(m.cpus for m in able)} CPUs and {max(m.memory_bytes for m in able) / GIB:g} GiB"
        actions: tuple[str, ...] = (f"lower cpus_per_node and memory_gib_per_node; a node has up to {most}",)
    elif len(roomy) >= compute.nodes:
        detail += f", but no {compute.within} holds more than {max(groups, default=0)} of them"
        actions = ("leave compute.within out, or ask for fewer nodes",)
    else:
        shape = nearest(spec, machines)
        actions = (f"use accelerator_type {shape[0]} with num_accelerators {shape[1]}",) if shape else ()
    facts = {"nearest": {"accelerator_type": shape[0], "num_accelerators": shape[1]}} if shape else {}
    return problem("never_fits", detail, next_actions=actions, facts=facts | {"models": here})


def nearest(spec: JobSpec, machines: Sequence[Machine]) -> tuple[str, int] | None:
    """The shape that fits with the most of the asked GPUs: same model when there is one, same nodes when possible."""
    compute = spec.compute
    here = {g.model for m in machines for g in m.gpus}
    kept = {m: compute.models for m in (compute.model,) if not compute.models or set(compute.models) & here}
    best: tuple[int, bool, str, int] | None = None
    for model, models in (kept or {m: (m,) for m in sorted(here)}).items():
        counts = [_count(m, models) for m in machines if _beside(m, compute)]
        for per_node in range(1, compute.per_node + 1):
            able = min(compute.nodes, sum(c >= per_node for c in counts))
            candidate = (able * per_node, per_node == compute.per_node, model, per_node)
            if able and (best is None or candidate[:2] > best[:2]):
                best = candidate
    return (f"GPU_{best[3]}x{best[2]}", best[0]) if best else None


def _count(machine: Machine, models: tuple[str, ...]) -> int:
    """How many of the node's GPUs will do; no model named means any."""
    return sum(not models or g.model in models for g in machine.gpus)


def _beside(machine: Machine, compute: Compute) -> bool:
    """Whether the node has the cores and the memory that go with the GPUs."""
    return machine.cpus >= compute.cpus_per_node and machine.memory_bytes >= compute.memory_gib_per_node * GIB


def _groups(machines: Sequence[Machine], within: str | None, labels: Mapping[str, Mapping[str, str]]) -> list[int]:
    """How many nodes share a value of the label; without a label all are together."""
    if within is None:
        return [len(machines)]
    values = (labels.get(m.name, {}).get(within, m.labels.get(within)) for m in machines)
    return list(Counter(v for v in values if v is not None).values())
