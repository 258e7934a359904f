"""Why a job waits: true reasons with numbers, the binding one first, and what the submitter may do."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_proto import Reason

from .gang import matching
from .state import Job, Node, State

SHOWN = 20  # blockers named; the numbers are in the facts


def held_back(job: Job, now_ms: int) -> Reason:
    return Reason(
        code="backoff",
        message="The last attempt failed on infrastructure; the next one starts after a pause",
        facts={"starts_in_ms": job.not_before_ms - now_ms, "retries": job.retries},
    )


def why_not_placed(
    job: Job, state: State, free: Mapping[str, tuple[str, ...]], avoid: tuple[str, ...], ahead: tuple[str, ...]
) -> tuple[Reason, ...]:
    """Reasons in the order in which they bind, for a job that no set of free GPUs can hold now."""
    compute = job.spec.compute
    every = [n for n in state.nodes.values() if len(matching(n, compute.model)) >= compute.per_node]
    working = [n for n in every if n.takes_work and n.name not in avoid]
    open_now = [n for n in working if _usable(n, job, free) >= compute.per_node]
    need = f"{compute.nodes} node{'s' if compute.nodes > 1 else ''} with {compute.per_node} free {_model(job)}"
    reasons: list[Reason] = []
    if len(every) < compute.nodes:
        reasons.append(
            Reason(
                code="too_few_nodes",
                message=f"Needs {need}; only {len(every)} such node(s) have joined",
                facts={"nodes_needed": compute.nodes, "nodes_of_this_kind": len(every)},
                actions=("wait for nodes to join", "ask for fewer accelerators"),
            )
        )
    out = [n for n in every if not n.takes_work]
    if len(every) >= compute.nodes > len(working):
        away = [f"{n.name} ({n.verdict}: {n.reason or 'not tested yet'})" for n in out]
        away += [f"{name} (excluded for this job after a failure there)" for name in avoid]
        reasons.append(
            Reason(
                code="nodes_unavailable",
                message=f"Needs {need}; {len(working)} of {len(every)} such nodes take its work",
                facts={"nodes_needed": compute.nodes, "nodes_available": len(working)},
                blockers=tuple(away),
                actions=("wait for the nodes to be released", "ask an operator to re-test them"),
            )
        )
    if len(working) >= compute.nodes > len(open_now):
        holders = sorted({job_id for n in working for job_id, _ in state.owner.get(n.name, {}).values()})
        reasons.append(
            Reason(
                code="gpus_busy",
                message=f"Needs {need}; {len(open_now)} of {len(working)} nodes have that many free now",
                facts={"nodes_needed": compute.nodes, "nodes_free": len(open_now)},
                blockers=tuple(holders[:SHOWN]),
                actions=("wait for a job to end", "ask for fewer accelerators"),
            )
        )
    if ahead and len(open_now) >= compute.nodes:
        reasons.append(
            Reason(
                code="behind",
                message=f"{ahead[0]} is ahead in the queue and waits for the same GPUs",
                blockers=ahead,
            )
        )
    return tuple(reasons)


def _usable(node: Node, job: Job, free: Mapping[str, tuple[str, ...]]) -> int:
    wanted = {g.uuid for g in matching(node, job.spec.compute.model)}
    return sum(uuid in wanted for uuid in free.get(node.name, ()))


def _model(job: Job) -> str:
    return "GPUs" if job.spec.compute.model == "ANY" else f"{job.spec.compute.model} GPUs"
