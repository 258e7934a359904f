"""A health leader on a log kept in a list: events in, rulings out and folded back, as the leader loop does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stoker_health.allreduce import contribution
from stoker_health.judge import rule_nodes
from stoker_health.judge_gang import rule_gangs
from stoker_health.verdict import Health, evolve
from stoker_proto import (
    Allocation,
    AllReduceSum,
    AttemptExited,
    AttemptPlaced,
    CheckResult,
    Event,
    FindingRecorded,
    NodeScanned,
    PreflightReported,
    RankExit,
    Recorded,
    RetestRequested,
    SelfTested,
)
from stoker_proto.nodes import Severity
from tests.builders import ListLog, joined


@dataclass
class Leader:
    """Folds what is told and appends what is ruled, until nothing more is."""

    log: ListLog = field(default_factory=ListLog)
    health: Health = field(default_factory=Health)
    silent: set[str] = field(default_factory=set)

    def fold(self, event: Event) -> Recorded:
        recorded = self.log.append(event)
        self.health = evolve(self.health, recorded)
        return recorded

    def rule(self) -> list[Event]:
        """What the leader says now. Ten rounds at most: a leader that never comes to rest is wrong."""
        said: list[Event] = []
        for _ in range(10):
            rulings = [*rule_nodes(self.health, self.silent), *rule_gangs(self.health, self.log.at_ms)]
            if not rulings:
                return said
            for ruling in rulings:
                if ruling.verdict_seq is not None:
                    assert ruling.verdict_seq == self.health.nodes[getattr(ruling.event, "node")].verdict_seq  # noqa: B009
                self.fold(ruling.event)
                said.append(ruling.event)
        raise AssertionError(f"the leader never comes to rest: {said}")

    def tell(self, *events: Event) -> list[Event]:
        for event in events:
            self.fold(event)
        return self.rule()

    def verdict(self, node: str = "n1") -> str:
        return self.health.nodes[node].verdict

    def ready(self, *nodes: str) -> Leader:
        """Nodes that joined and passed their first test."""
        for node in nodes:
            self.tell(joined(node), self_test(node))
            assert self.verdict(node) == "ready"
        return self

    def retest(self, node: str = "n1", *, passed: bool = True) -> list[Event]:
        asked = self.fold(RetestRequested(node=node))
        return self.tell(self_test(node, "retest", began=asked.seq, passed=passed))


def self_test(
    node: str = "n1", cause: Literal["joined", "retest"] = "joined", *, began: int = 0, passed: bool = True,
    epoch: str = "b1",
) -> SelfTested:  # fmt: skip
    bad = CheckResult(check="allreduce_sum", status="bad", severity="fatal", detail="wrong at local rank 0")
    results = () if passed else (bad,)
    return SelfTested(
        node=node, boot_epoch=epoch, cause=cause, began_seq=began, passed=passed, results=results
    )  # fmt: skip


def found(
    node: str = "n1", severity: Severity = "fatal", *, status: str = "bad", check: str = "gpu_present",
    entity: str = "node", id: str = "f1", epoch: str = "b1",
) -> FindingRecorded:  # fmt: skip
    result = CheckResult.model_validate(
        {"check": check, "status": status, "severity": severity, "entity": entity, "detail": f"{check} says {status}"}
    )
    return FindingRecorded(node=node, boot_epoch=epoch, finding_id=id, result=result)


def gang(*nodes: str, gpus: int = 2, preflight: Literal["fresh", "required"] = "required") -> AttemptPlaced:
    """Attempt 1 of job j on these nodes, each with its first GPUs."""
    allocations = tuple(
        Allocation(node=n, boot_epoch="b1", gpus=tuple(f"{n}-gpu-{i}" for i in range(gpus)), node_rank=rank)
        for rank, n in enumerate(nodes)
    )
    return AttemptPlaced(job_id="j", attempt=1, fence=1, allocations=allocations, preflight=preflight)


def report(
    node: str, ranks: range, world: int, *, wrong_slots: tuple[int, ...] = (), round: int = 1, **more: Any
) -> PreflightReported:
    """What a node's probe ranks read: right but for the given slots."""
    slots = tuple(contribution(s) + (s in wrong_slots) for s in range(world))
    sums = tuple(AllReduceSum(rank=r, slots=slots, seconds=0.1) for r in ranks)
    body: dict[str, Any] = {"results": (), "sums": sums} | more
    return PreflightReported(node=node, boot_epoch="b1", job_id="j", attempt=1, round=round, **body)


def exit_of(node: str, *ranks: RankExit, outcome: str = "user_error", **more: Any) -> AttemptExited:
    body: dict[str, Any] = {"ranks": ranks, "before_stop": tuple(r.rank for r in ranks), "outcome": outcome} | more
    return AttemptExited.model_validate({"job_id": "j", "attempt": 1, "node": node, "fence": 1} | body)


def scanned(node: str) -> NodeScanned:
    return NodeScanned(node=node, boot_epoch="b1", job_id="j", attempt=1)
