"""The health leader's fold: nodes, their findings and tests, and the verdict on each. Pure.

A node goes to quarantine at the first fatal finding of its boot epoch. It comes back only by a re-test that was asked
for after the last fault and passed: the absence of new errors is not recovery. Only bad answers are kept: not supported
and could-not-measure never change a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_proto import (
    FindingRecorded,
    NodeJoined,
    NodeReady,
    NodeReleased,
    Recorded,
    RetestRequested,
    SelfTested,
    VerdictEvent,
)

from .gangs import Gang, evolve_gangs


@dataclass(slots=True)
class Node:
    """One node in its present boot epoch. Sequences say what came before what."""

    name: str
    epoch: str
    verdict: str = "validating"
    verdict_seq: int = 0
    before_unknown: str = "validating"
    findings: list[tuple[int, FindingRecorded]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    fault_seq: int = 0
    released_seq: int = 0
    tested: tuple[int, SelfTested] | None = None
    retest_seq: int = 0


@dataclass(slots=True)
class Health:
    """Everything the leader knows."""

    nodes: dict[str, Node] = field(default_factory=dict)
    gangs: dict[tuple[str, int], Gang] = field(default_factory=dict)
    ignored: int = 0


def evolve(health: Health, recorded: Recorded) -> Health:
    """The state after this event. The state given is consumed."""
    event, seq = recorded.event, recorded.seq
    match event:
        case NodeJoined():
            node = health.nodes.get(event.node)
            if node is None or node.epoch != event.boot_epoch:
                verdict_seq = node.verdict_seq if node else 0
                health.nodes[event.node] = Node(event.node, event.boot_epoch, verdict_seq=verdict_seq)
        case VerdictEvent():
            _verdict(health, event, seq)
        case FindingRecorded():
            node = health.nodes.get(event.node)
            if node is None or node.epoch != event.boot_epoch or event.finding_id in node.known:
                pass
            elif event.result.status == "bad":
                node.known.add(event.finding_id)
                node.findings.append((seq, event))
                if event.result.severity in ("degraded", "fatal"):
                    node.fault_seq = seq
        case SelfTested():
            node = health.nodes.get(event.node)
            if node is not None and node.epoch == event.boot_epoch:
                node.tested = (seq, event)
                if not event.passed:
                    node.fault_seq = seq
        case RetestRequested():
            node = health.nodes.get(event.node)
            if node is not None:
                node.retest_seq = seq
        case _:
            evolve_gangs(health.gangs, recorded)
    return health


def _verdict(health: Health, event: VerdictEvent, seq: int) -> None:
    node = health.nodes.get(event.node)
    if node is None:
        health.ignored += 1
        return
    node.verdict_seq = seq
    if node.epoch != event.boot_epoch:
        health.ignored += 1
        return
    verdict = event.verdict
    if verdict == "unknown" and node.verdict != "unknown":
        node.before_unknown = node.verdict
    if isinstance(event, NodeReady | NodeReleased):
        node.released_seq = seq
    node.verdict = verdict
