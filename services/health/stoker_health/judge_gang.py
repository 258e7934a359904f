"""What the health leader says of gangs: preflights that can be judged, failures that can be blamed. Pure."""

from __future__ import annotations

from stoker_proto import (
    CheckResult,
    FindingRecorded,
    PreflightFailed,
    PreflightPassed,
    PreflightReported,
)

from .allreduce import wrong_ranks
from .blame import attribute
from .gangs import Gang
from .judge import Ruling
from .verdict import Health

MAX_ROUNDS = 3
ATTRIBUTION_MS = 15_000
PROBE_CHECKS = ("allreduce_sum", "matmul_checksum")


def rule_gangs(health: Health, now_ms: int) -> list[Ruling]:
    """Preflights that can be judged, and failures that can be blamed."""
    rulings: list[Ruling] = []
    for gang in health.gangs.values():
        if gang.required and not gang.judged:
            rulings += _judge_preflight(gang, health)
        if gang.failed_ms is not None and not gang.attributed and _known(gang, now_ms):
            found = [
                f
                for name in gang.nodes
                if name in health.nodes
                for seq, f in health.nodes[name].findings
                if seq > gang.placed_seq and gang.holds(name, f.result.entity)
            ]
            event = attribute(gang.job_id, gang.attempt, gang.exits, found, nodes=len(gang.nodes))
            rulings.append(Ruling(event, id=f"attributed:{gang.job_id}:{gang.attempt}"))
    return rulings


def _known(gang: Gang, now_ms: int) -> bool:
    """Every node has told its exits and looked at its devices, or the time for that is over."""
    assert gang.failed_ms is not None
    told = {e.node for e in gang.exits}
    return (told >= set(gang.nodes) and gang.scanned >= set(gang.nodes)) or now_ms >= gang.failed_ms + ATTRIBUTION_MS


def due_ms(health: Health) -> int | None:
    """When the next failure is blamed on what is known by then."""
    open_ms = [g.failed_ms + ATTRIBUTION_MS for g in health.gangs.values() if g.failed_ms and not g.attributed]
    return min(open_ms, default=None)


def _judge_preflight(gang: Gang, health: Health) -> list[Ruling]:
    if not gang.reports:
        return []
    latest = max(gang.reports)
    reports = gang.reports[latest]
    if set(reports) < set(gang.nodes):
        return []
    faults = _faults(gang, reports)
    if faults:
        named = tuple(sorted(faults))
        rulings = [Ruling(f, id=f.finding_id) for f in (_finding(faults[n], n, gang, health) for n in named) if f]
        detail = "; ".join(f"{n}: {faults[n].detail or faults[n].check}" for n in named)
        return [*rulings, _failed(gang, named, detail)]
    errors = {n: r.error for n, r in reports.items() if r.error}
    unpinned = not errors and wrong_ranks(_copies(reports), gang.world)[1]
    if not errors and not unpinned:
        passed = PreflightPassed(job_id=gang.job_id, attempt=gang.attempt, nodes=gang.nodes)
        return [Ruling(passed, id=f"preflight:{gang.job_id}:{gang.attempt}")]
    if unpinned:
        return [_failed(gang, (), "the all-reduce was wrong, and no single node could be named")]
    if latest >= MAX_ROUNDS:
        detail = "; ".join(f"{n}: {e}" for n, e in sorted(errors.items()))
        return [_failed(gang, (), f"the all-reduce could not be measured in {MAX_ROUNDS} rounds: {detail}")]
    return []


def _failed(gang: Gang, nodes: tuple[str, ...], detail: str) -> Ruling:
    event = PreflightFailed(job_id=gang.job_id, attempt=gang.attempt, nodes=nodes, detail=detail)
    return Ruling(event, id=f"preflight:{gang.job_id}:{gang.attempt}")


def _copies(reports: dict[str, PreflightReported]) -> dict[int, tuple[int, ...]]:
    return {s.rank: s.slots for r in reports.values() for s in r.sums}


def _faults(gang: Gang, reports: dict[str, PreflightReported]) -> dict[str, CheckResult]:
    """Nodes at fault with the result that shows it."""
    faults: dict[str, CheckResult] = {}
    for name, report in reports.items():
        bad = [r for r in report.results if r.status == "bad"]
        fatal = [r for r in bad if r.severity == "fatal"]
        ours = [r for r in bad if r.severity == "degraded" and gang.holds(name, r.entity)]
        if fatal or ours:
            faults[name] = (fatal or ours)[0]
    if any(r.error for r in reports.values()):
        return faults
    ranks, wrong = wrong_ranks(_copies(reports), gang.world)
    if wrong and len(gang.nodes) == 1:
        ranks = frozenset(range(gang.world))  # whichever it was, it is on this node
    first = 0
    for name, gpus in zip(gang.nodes, gang.gpus, strict=True):
        mine = sorted(ranks & set(range(first, first + len(gpus))))
        first += len(gpus)
        if mine and name not in faults:
            faults[name] = CheckResult(
                check="allreduce_sum",
                status="bad",
                severity="fatal",
                action="inspect",
                detail=f"all-reduce wrong at rank {', '.join(map(str, mine))}",
            )
    return faults


def _finding(result: CheckResult, name: str, gang: Gang, health: Health) -> FindingRecorded | None:
    node = health.nodes.get(name)
    if node is None or result.check not in PROBE_CHECKS:
        return None  # device findings are the agent's own to record
    finding_id = f"{name}:{node.epoch}:{result.check}:{gang.job_id}:{gang.attempt}"
    return FindingRecorded(node=name, boot_epoch=node.epoch, finding_id=finding_id, result=result)
