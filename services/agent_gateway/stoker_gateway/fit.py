"""Whether any set of the nodes that exist could ever hold a job, and if not, which shape could. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stoker_proto import Gpu, JobSpec, Problem, problem


def never_fits(spec: JobSpec, nodes: Sequence[Sequence[Gpu]]) -> Problem | None:
    """A Problem when even the empty cluster could not hold the job. With no node joined yet nothing can be said."""
    if not any(nodes):
        return None
    compute = spec.compute
    models = sorted({g.model for gpus in nodes for g in gpus})
    counts = _counts(nodes, compute.model)
    if sum(count >= compute.per_node for count in counts) >= compute.nodes:
        return None
    if compute.model != "ANY" and compute.model not in models:
        known = ", ".join(models)
        detail = f"There is no {compute.model} here; the GPUs here are {known}"
    else:
        detail = (
            f"{compute.nodes} node(s) with {compute.per_node} {compute.model} GPUs each are needed; "
            f"{sum(c >= compute.per_node for c in counts)} of {len(nodes)} nodes have that many"
        )
    shape = nearest(spec, nodes)
    actions = (f"use accelerator_type {shape[0]} with num_accelerators {shape[1]}",) if shape else ()
    facts = {"nearest": {"accelerator_type": shape[0], "num_accelerators": shape[1]}} if shape else {}
    return problem("never_fits", detail, next_actions=actions, facts=facts | {"models": models})


def nearest(spec: JobSpec, nodes: Sequence[Sequence[Gpu]]) -> tuple[str, int] | None:
    """The shape that fits with the most of the asked GPUs: same model when there is one, same nodes when possible."""
    compute = spec.compute
    models = {g.model for gpus in nodes for g in gpus}
    tried = [compute.model] if compute.model == "ANY" or compute.model in models else sorted(models)
    best: tuple[int, bool, str, int] | None = None
    for model in tried:
        counts = _counts(nodes, model)
        for per_node in range(1, compute.per_node + 1):
            able = min(compute.nodes, sum(c >= per_node for c in counts))
            candidate = (able * per_node, per_node == compute.per_node, model, per_node)
            if able and (best is None or candidate[:2] > best[:2]):
                best = candidate
    return (f"GPU_{best[3]}x{best[2]}", best[0]) if best else None


def _counts(nodes: Sequence[Sequence[Gpu]], model: str) -> list[int]:
    return [sum(model in ("ANY", g.model) for g in gpus) for gpus in nodes]
