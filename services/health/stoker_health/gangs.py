"""The health leader's fold of gangs: their preflights, and attempts that failed and are not blamed yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    NodeScanned,
    PreflightFailed,
    PreflightPassed,
    PreflightReported,
    Recorded,
)


@dataclass(slots=True)
class Gang:
    """One attempt, as far as health cares: its preflight and its failure."""

    job_id: str
    attempt: int
    placed_seq: int
    nodes: tuple[str, ...]
    gpus: tuple[tuple[str, ...], ...]
    required: bool
    judged: bool = False
    reports: dict[int, dict[str, PreflightReported]] = field(default_factory=dict)
    exits: list[AttemptExited] = field(default_factory=list)
    failed_ms: int | None = None
    scanned: set[str] = field(default_factory=set)
    attributed: bool = False

    @property
    def world(self) -> int:
        return sum(map(len, self.gpus))

    def holds(self, node: str, entity: str) -> bool:
        """Whether a fault of this entity of this node concerns the attempt: the node itself, or a GPU that it has."""
        return node in self.nodes and (entity == "node" or entity in self.gpus[self.nodes.index(node)])


def evolve_gangs(gangs: dict[tuple[str, int], Gang], recorded: Recorded) -> None:
    """What this event changes about gangs."""
    event = recorded.event
    if isinstance(event, AttemptPlaced):
        key = (event.job_id, event.attempt)
        by_rank = sorted(event.allocations, key=lambda a: a.node_rank)
        gangs[key] = Gang(
            event.job_id,
            event.attempt,
            recorded.seq,
            tuple(a.node for a in by_rank),
            tuple(a.gpus for a in by_rank),
            event.preflight == "required",
        )
        return
    if isinstance(event, JobFinished):
        for key in [k for k in gangs if k[0] == event.job_id]:
            del gangs[key]
        return
    if not isinstance(
        event,
        JobRequeued
        | PreflightReported
        | PreflightPassed
        | PreflightFailed
        | AttemptExited
        | NodeScanned
        | JobFailureAttributed,
    ):
        return
    gang = gangs.get((event.job_id, event.attempt))
    if gang is None:
        return
    match event:
        case JobRequeued():
            del gangs[(event.job_id, event.attempt)]
        case PreflightReported():
            gang.reports.setdefault(event.round, {})[event.node] = event
        case PreflightPassed() | PreflightFailed():
            gang.judged = True
        case AttemptExited():
            gang.exits.append(event)
            if gang.failed_ms is None and event.failed:
                gang.failed_ms = recorded.at_ms
        case NodeScanned():
            gang.scanned.add(event.node)
        case JobFailureAttributed():
            gang.attributed = True
