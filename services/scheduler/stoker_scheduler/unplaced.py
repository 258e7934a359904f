"""Why no set of free GPUs holds a job: no node could, too few take its work, they are busy, or kept for others."""

from __future__ import annotations

from typing import NamedTuple

from stoker_proto import Reason

from .board import Board
from .fragments import Bools
from .gang import domains
from .placement import fitting
from .state import Job, Node

SHOWN = 20  # blockers named; the numbers are in the facts
Fact = str | int | float | list[str]


def gpus_of(milli: int) -> float:
    """Thousandths as GPUs."""
    return milli / 1000


class Around(NamedTuple):
    """Nodes of one kind: all, those that take the job's work, some of who holds them, and how much of them is free."""

    every: tuple[Node, ...]
    working: tuple[Node, ...]
    holders: tuple[str, ...]
    free: int


def around(board: Board, every: tuple[Node, ...], avoid: tuple[str, ...]) -> Around:
    working = tuple(n for n in every if n.takes_work and n.name not in avoid)
    holders: set[str] = set()
    for node in working:
        holders |= board.state.holders(node.name)
        if len(holders) >= SHOWN:
            break
    return Around(every, working, tuple(sorted(holders)[:SHOWN]), _free(board, working))


def why_unplaced(board: Board, job: Job, avoid: tuple[str, ...], near: Around) -> tuple[Reason, ...]:
    """What keeps a job of this shape from free GPUs, in the order in which it binds."""
    state, demand = board.state, job.demand
    every, working, holders, free = near
    need = f"{demand.nodes} node{'s' if demand.nodes > 1 else ''} with {_share(job)}"
    reasons: list[Reason] = []
    if not every and (never := _unfit(board, job, need)):
        return (never,)
    if len(every) < demand.nodes:
        reasons.append(
            Reason(
                code="too_few_nodes",
                message=f"Needs {need}; only {len(every)} such node(s) have joined",
                facts={"nodes_needed": demand.nodes, "nodes_of_this_kind": len(every)},
                actions=("wait for nodes to join", "ask for fewer accelerators"),
            )
        )
        return tuple(reasons)
    if len(working) < demand.nodes:
        away = [f"{n.name} ({n.verdict}: {n.reason or 'not tested yet'})" for n in every if not n.takes_work]
        away += [f"{name} (excluded for this job after a failure there)" for name in avoid]
        reasons.append(
            Reason(
                code="nodes_unavailable",
                message=f"Needs {need}; {len(working)} of {len(every)} such nodes take its work",
                facts={"nodes_needed": demand.nodes, "nodes_available": len(working)},
                blockers=tuple(away[:SHOWN]),
                actions=("wait for the nodes to be released", "ask an operator to re-test them"),
            )
        )
        return tuple(reasons)
    rows = board.usable(job) & (board.topology.ready | board.topology.suspect)
    open_now = int(fitting(state.capacity, demand, rows).sum())
    open_unclaimed = int(fitting(board.capacity, demand, rows).sum())
    if open_now < demand.nodes:
        reasons.append(
            Reason(
                code="gpus_busy",
                message=f"Needs {need}; {open_now} of {len(working)} nodes have that many free now",
                facts={
                    "nodes_needed": demand.nodes,
                    "nodes_free": open_now,
                    "nodes_of_this_kind": len(working),
                    "free_gpus": gpus_of(free),
                },
                blockers=holders,
                actions=("wait for a job to end", "ask for fewer accelerators"),
            )
        )
    elif open_unclaimed < demand.nodes:
        names = {n.name for n in working}
        claimers = sorted({j for (node, _), j in board.claimed.items() if node in names})
        if claimers:
            reasons.append(
                Reason(
                    code="kept_for_others",
                    message=f"Needs {need}; they are free, but kept for {', '.join(claimers[:3])}, which came first",
                    facts={"nodes_free": open_now, "nodes_not_kept": open_unclaimed},
                    blockers=tuple(claimers[:SHOWN]),
                    actions=("set limits.timeout_minutes: a job that is gone in time may use them",),
                )
            )
    elif (level := job.spec.compute.within) is not None and not _fits_within(board, job, rows, level):
        reasons.append(
            Reason(
                code="topology",
                message=f"Needs {need} inside one {level}; {open_unclaimed} are free, but not in one {level}",
                facts={"within": level, "nodes_free": open_unclaimed},
                actions=(f"ask for it without compute.within {level}", "wait for a job to end"),
            )
        )
    if not reasons:
        taken = "Free GPUs went to jobs that come first"
        reasons.append(Reason(code="behind", message=f"Needs {need}. {taken}", facts={"nodes_free": open_now}))
    return tuple(reasons)


def _fits_within(board: Board, job: Job, rows: Bools, level: str) -> bool:
    free = fitting(board.capacity, job.demand, rows)
    return next(domains(board.topology, free, job.demand.nodes, level), None) is not None


def _unfit(board: Board, job: Job, need: str) -> Reason | None:
    """Why no node could hold a share even when it is empty; None when there are no GPUs at all yet."""
    demand, nodes = job.demand, board.layout.nodes
    models = sorted({gpu.model for node in nodes for gpu in node.gpus})
    able = [node for node in nodes if any(not demand.models or gpu.model in demand.models for gpu in node.gpus)]
    if not models:
        return None
    if not able:
        return Reason(
            code="no_such_gpu",
            message=f"Needs {need}; the GPUs here are {', '.join(models)}",
            facts={"models": models, "models_asked": list(demand.models)},
            actions=(f"ask for {' or '.join(models[:3])}", "wait for nodes to join"),
        )
    most = max(sum(not demand.models or gpu.model in demand.models for gpu in node.gpus) for node in able)
    cores, memory = max(n.cpu_milli for n in able) / 1000, max(n.memory_mib for n in able) / 1024
    facts: dict[str, Fact] = {}
    actions = []
    if most < demand.gpus:
        facts |= {"gpus_asked": demand.gpus, "most_gpus_on_a_node": most}
        spread = -(-demand.gpus * demand.nodes // most)
        actions.append(f"ask for GPU_{most}x{job.spec.compute.model} on {spread} nodes")
    if cores * 1000 < demand.cpu:
        facts |= {"cores_asked": demand.cpu / 1000, "most_cores_on_a_node": cores}
        actions.append(f"ask for at most {cores:g} cores per node")
    if memory * 1024 < demand.memory:
        facts |= {"gib_asked": demand.memory / 1024, "most_gib_on_a_node": memory}
        actions.append(f"ask for at most {memory:g} GiB per node")
    return Reason(
        code="nodes_too_small", message=f"Needs {need}; no node has that much even when it is empty", facts=facts,
        actions=(*actions, "wait for larger nodes to join"),
    )  # fmt: skip


def _free(board: Board, nodes: tuple[Node, ...]) -> int:
    return sum(sum(board.state.capacity.left(n.name)[0]) for n in nodes)


def _share(job: Job) -> str:
    demand = job.demand
    kind = " or ".join(demand.models) + " GPUs" if demand.models else "GPUs"
    if demand.milli < 1000:
        text = f"{gpus_of(demand.milli):g} of {demand.gpus} {kind} free"
    else:
        text = f"{demand.gpus} free {kind}"
    if demand.cpu:
        text += f", {demand.cpu / 1000:g} cores"
    if demand.memory:
        text += f", {demand.memory / 1024:g} GiB"
    return text
