"""Where a gang fits: whole nodes' worth of free GPUs, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_proto import Allocation, Gpu

from .state import Job, Node, State


def matching(node: Node, model: str) -> tuple[Gpu, ...]:
    """The node's GPUs of this model."""
    return node.gpus if model == "ANY" else tuple(g for g in node.gpus if g.model == model)


def excluded(job: Job, state: State, now_ms: int) -> tuple[str, ...]:
    """Nodes that the job still avoids: not after a later test, not after the exclusion's end."""
    nodes = []
    for exclusion in job.exclusions:
        node = state.nodes.get(exclusion.node)
        retested = node is not None and node.verdict == "ready" and node.verdict_seq > exclusion.seq
        if not retested and exclusion.until_ms > now_ms:
            nodes.append(exclusion.node)
    return tuple(nodes)


def place(
    job: Job, nodes: list[Node], free: Mapping[str, tuple[str, ...]], avoid: tuple[str, ...]
) -> tuple[Allocation, ...] | None:
    """Allocations for the whole gang on free GPUs, or None.

    Fullest nodes that still fit come first, so that whole nodes stay whole; suspect nodes come last; then by name.
    """
    compute = job.spec.compute
    fits: list[tuple[bool, int, str, Node, tuple[str, ...]]] = []
    for node in nodes:
        if node.name in avoid:
            continue
        wanted = {g.uuid for g in matching(node, compute.model)}
        usable = tuple(uuid for uuid in free[node.name] if uuid in wanted)
        if len(usable) >= compute.per_node:
            fits.append((node.verdict == "suspect", len(usable), node.name, node, usable))
    if len(fits) < compute.nodes:
        return None
    fits.sort(key=lambda fit: fit[:3])
    return tuple(
        Allocation(node=node.name, boot_epoch=node.boot_epoch, gpus=usable[: compute.per_node], node_rank=rank)
        for rank, (_, _, _, node, usable) in enumerate(fits[: compute.nodes])
    )
